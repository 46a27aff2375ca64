"""The tutorials and the README do what they say: their blocks are run from the text, in order, in one directory."""

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_files import fair_esm, write_fair_esm

from esmshard.model.families.esm2 import SIZES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("tutorial-*.md"))]
if not all(page.is_file() for page in PAGES):
    pytest.skip("needs the whole repository, whose pages these tests read", allow_module_level=True)
RELEASED = "esm2_t6_8M_UR50D"
"""The released model of the README, whose place random weights of its shape take here."""
PROTEIN = "MTYKLILNGKTLKGETTTEAVDAATAEKVFKQYANDNGVDGEWTYDDATKTFTVTE"
SMALL = """\
esmshard() {
    case "$1 $2" in
        "finetune contact") command esmshard "$@" train.steps=2 train.eval_every=2 data.max_length=64;;
        "finetune variants") command esmshard "$@" train.epochs=1 --folds 3;;
        "finetune sequence") command esmshard "$@" train.epochs=1;;
        *) command esmshard "$@";;
    esac
}
"""
"""The commands of the README in bash, with less training than a user wants."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block that names its language."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def script(page: Path) -> str:
    """All blocks as one script of bash, which writes the output of block k to `k.txt` and its exit code to `k.code`."""
    lines = []
    for k, (language, text) in enumerate(blocks(page)):
        typed = f"{sys.executable} - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n" if language == "python" else text
        if language != "text":
            lines += [f"exec > $OUTPUTS/{k}.txt 2>&1", f"{typed}echo $? > $OUTPUTS/{k}.code"]
    return "\n".join(lines)


def own_data(folder: Path) -> None:
    """The files of a user that the README names."""
    mutants = [f"{old}{n}{new}" for n, old in enumerate(PROTEIN[:30], 1) for new in "AW" if new != old]
    (folder / "my.csv").write_text("mutant,score\n" + "".join(f"{m},{k % 7}\n" for k, m in enumerate(mutants)))
    (folder / "wt.fasta").write_text(f">wt\n{PROTEIN}\n")
    (folder / "my.fasta").write_text(f">a\n{PROTEIN}\n>b\n{PROTEIN[::-1]}\n")
    (folder / "uniref50.fasta.gz").write_bytes(gzip.compress((folder / "my.fasta").read_bytes()))
    for k, name in enumerate(("train", "valid", "test")):
        rows = [f"{name}{n},{PROTEIN[n + k :]},{n}\n" for n in range(1, 25, 2)]
        (folder / f"{name}.csv").write_text("id,sequence,label\n" + "".join(rows))
    (folder / "my.yaml").write_bytes((ROOT / "recipes" / "contact.yaml").read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_typed(page: Path, tmp_path: Path) -> None:
    outputs, folder = tmp_path / "outputs", tmp_path / "empty"
    outputs.mkdir()
    folder.mkdir()
    typed, of_readme = script(page), page.stem == "README"
    if of_readme:
        own_data(folder)
        (cache := tmp_path / "torch" / "hub" / "checkpoints").mkdir(parents=True)
        write_fair_esm(cache / f"{RELEASED}.pt", fair_esm(SIZES[RELEASED]))
        typed = SMALL + typed
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OUTPUTS": str(outputs),
        "OMP_NUM_THREADS": "1",
        "TORCH_HOME": str(tmp_path / "torch"),
    }
    subprocess.run(["bash", "-c", typed], cwd=folder, env=environment, timeout=2400, check=False)
    said = ""
    for k, (language, text) in enumerate(blocks(page)):
        if language == "text":
            assert [line for line in text.splitlines() if line not in said] == [], said
            continue
        said = (outputs / f"{k}.txt").read_text()
        assert int((outputs / f"{k}.code").read_text()) == 0, f"{text}\n{said}"
        assert not re.search(r"^(error:|Traceback)", said, re.MULTILINE), f"{text}\n{said}"
        for result in re.findall(r"^print\(.*  # (.+)$", text, re.MULTILINE):
            assert result in said.splitlines(), said
