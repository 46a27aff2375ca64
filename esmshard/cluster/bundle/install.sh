#!/usr/bin/env bash
# Installs esmshard from the bundle that contains this file, on a machine without network.
# `esmshard bundle` writes this file. It needs bash, coreutils, awk and the Python below.
set -euo pipefail

version='@version@'
python_version='@python@'
machine='@machine@'
glibc='@glibc@'
driver='@driver@'
pip_wheel='@pip_wheel@'
needed_kib='@needed_kib@'
weights='@weights@'

usage() {
  cat <<USAGE
usage: bash install.sh [--python PYTHON] [DIR]

Installs esmshard $version from this bundle into DIR (by default ~/esmshard), without network.
  --python PYTHON   interpreter of Python $python_version; by default python$python_version, else python3
USAGE
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit "${2:-1}"
}

# Succeeds if version $1 is $2 or newer.
at_least() {
  [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$2" ]]
}

prefix=${HOME:-}/esmshard
python=
positional=0
while (($#)); do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --python) [[ $# -ge 2 ]] || fail '--python: name an interpreter' 2; python=$2; shift ;;
    --python=*) python=${1#*=} ;;
    -*) fail "$1: unknown option; see install.sh --help" 2 ;;
    '') fail 'the directory has an empty name' 2 ;;
    *) ((positional++ == 0)) || fail "$1: one directory is expected" 2; prefix=$1 ;;
  esac
  shift
done
[[ $prefix == /* ]] || prefix=$PWD/$prefix
# The scripts of venv and pip contain this path, and do not quote these characters.
case $prefix in
  *['$`"\:']* | *$'\n'*) fail "$prefix: choose a directory without \$, \`, \", \\, : and line breaks in its path" 2 ;;
esac

[[ $python != */* || $python == /* ]] || python=$PWD/$python
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

# 1. Check that the bundle is complete, and that it fits this machine.
[[ -f SHA256SUMS ]] || fail "$PWD: no SHA256SUMS; the bundle is incomplete, so make or copy it again"
command -v sha256sum >/dev/null || fail 'sha256sum is missing (GNU coreutils)'
sha256sum --check --strict --quiet SHA256SUMS ||
  fail "$PWD: the files named above are not what SHA256SUMS says; copy the bundle again"
[[ $(uname -s) == Linux && $(uname -m) == "$machine" ]] ||
  fail "this machine is $(uname -s) $(uname -m), and the bundle is for Linux $machine; make one with --platform"
if [[ -n $glibc ]]; then
  found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || fail "the C library is not glibc, and the bundle needs glibc $glibc"
  at_least "${found##* }" "$glibc" ||
    fail "this machine has $found, and the bundle needs glibc $glibc; make one with --platform manylinux_${found##* }"
fi
if [[ -z $python ]]; then
  python=python$python_version
  command -v "$python" >/dev/null || python=python3
fi
command -v "$python" >/dev/null || fail "$python: not found; name Python $python_version with --python"
found=$("$python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python: does not run"
[[ $found == "$python_version" ]] ||
  fail "$python is Python $found, and the bundle is for $python_version; name one with --python, or make a bundle with --python $found"

# 2. Check that there is room.
if [[ -e $prefix && ! -d $prefix ]]; then
  fail "$prefix: exists already and is no directory; choose another one"
elif [[ -d $prefix && ! -e $prefix/.incomplete && -n $(ls -A -- "$prefix") ]]; then
  fail "$prefix: exists already; choose another directory"
fi
mkdir -p -- "$prefix"
touch -- "$prefix/.incomplete" # the same command begins an interrupted installation again
rm -rf -- "$prefix/venv" "$prefix/hf"
free_kib=$(df -Pk -- "$prefix" | awk 'NR == 2 { print $(NF - 2) }')
((free_kib >= needed_kib)) ||
  fail "$prefix: needs $((needed_kib / 1024)) MiB, and $((free_kib / 1024)) MiB are free; choose another directory"

# 3. Make the environment. pip runs from its own wheel, because Python may not have pip.
unset PYTHONPATH PYTHONHOME
printf 'installing esmshard %s into %s\n' "$version" "$prefix"
"$python" -I -m venv --without-pip "$prefix/venv" || fail "$python: cannot make a virtual environment; install its venv"
"$prefix/venv/bin/python" "wheels/$pip_wheel/pip" --isolated --disable-pip-version-check --no-cache-dir --quiet \
  install --no-index --find-links wheels --require-hashes -r requirements.txt ||
  fail 'pip could not install the wheels, as said above'

# 4. Copy the weights in the layout of the Hugging Face cache: as links if the file system allows them, else as copies.
if [[ -n $weights ]]; then
  mkdir -p -- "$prefix/hf"
  cp -Rl hf/. "$prefix/hf/" 2>/dev/null || cp -Rf hf/. "$prefix/hf/"
fi
{
  printf '# Source this file: the environment of esmshard %s, which uses no network.\n' "$version"
  printf '. %q\n' "$prefix/venv/bin/activate"
  printf 'export HF_HUB_OFFLINE=1 WANDB_MODE=offline PIP_NO_INDEX=1\n'
  [[ -z $weights ]] || printf 'export HF_HOME=%q\n' "$prefix/hf"
} >"$prefix/env.sh"

# 5. Check that the installation works.
# shellcheck source=/dev/null
. "$prefix/env.sh"
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
cd -- "$work"
esmshard --version
esmshard recipes ls >/dev/null
printf '>ubiquitin\nMQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG\n' >check.fasta
esmshard embed starter check.fasta -o check.npy >/dev/null || fail 'the installed esmshard does not compute, as said above'
for name in $weights; do
  python -c 'import sys; from esmshard.model.weights import hub; sys.exit(hub.find(sys.argv[1]) is None)' "$name" ||
    fail "$name: the installed weights are not found"
done
if [[ -n $driver ]] && command -v nvidia-smi >/dev/null; then
  found=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || found=
  [[ -z $found ]] || at_least "$found" "$driver" ||
    printf 'warning: the NVIDIA driver is %s, and this torch needs %s: GPUs will not be found\n' "$found" "$driver" >&2
fi
rm -f -- "$prefix/.incomplete"
printf 'done; in every shell and job:\n  source %q\n' "$prefix/env.sh"
