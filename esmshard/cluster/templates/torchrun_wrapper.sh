#!/bin/sh
# Starts torchrun in a pod, passes the cluster's SIGTERM on, and returns an exit code that says what to do next.
#
#   sh torchrun_wrapper.sh STATUS python -m torch.distributed.run ...
#
# STATUS is the path of the run's status.json, or '' for a command that writes none.
# - SIGTERM goes to the ranks, which save and leave. torchrun itself would end them after 30 seconds. Before training has
#   begun there is nothing to save: then torchrun is ended, and the exit code is 143.
# - torchrun returns 0 also for a run that was asked to stop and has saved. The state in status.json tells the two apart,
#   on each machine of the run, and the exit code is 75 then: start me again. Other exit codes stay as they are.
status=$1
shift
stopping='' ended='' asked='' waited=0
trap 'stopping=yes' TERM USR1
before=$(cat "$status" 2>/dev/null)

# The pod of index 0 hosts the rendezvous. torchrun would look for its own name in the DNS, which may come too late.
if [ -n "${PET_RDZV_CONF-}" ]; then
  [ "${JOB_COMPLETION_INDEX-}" = 0 ] && host=1 || host=0
  export PET_RDZV_CONF="$PET_RDZV_CONF,is_host=$host"
fi

# Whether status.json is still that of an earlier start. Training changes it first of all.
is_unchanged() {
  [ "$(cat "$status" 2>/dev/null)" = "$before" ]
}

# Unlike one that fails, a torchrun that a signal ends leaves the rendezvous open, for the pod that takes its place.
end_torchrun() {
  ended=yes
  kill -TERM "$torchrun" 2>/dev/null
}

stop() {
  [ -z "$ended" ] || return
  ranks=$(grep -ls "^PPid:[[:space:]]*$torchrun\$" /proc/[0-9]*/status | sed 's/[^0-9]//g' | tr '\n' ' ')
  if [ -z "$asked" ]; then
    if [ -z "$ranks" ] || is_unchanged; then
      end_torchrun
    fi
    asked=$ranks
    [ -n "$ended" ] || for rank in $ranks; do kill -TERM "$rank" 2>/dev/null; done
  elif [ -z "$ranks" ]; then
    # torchrun waits for those of the other pods, up to 300 seconds.
    waited=$((waited + 1))
    [ "$waited" -lt 120 ] || end_torchrun
  else
    for rank in $ranks; do
      case " $asked" in *" $rank "*) ;; *) end_torchrun ;; esac # It was started again and has nothing to save.
    done
  fi
}

"$@" &
torchrun=$!
while kill -0 "$torchrun" 2>/dev/null; do
  [ -z "$stopping" ] || stop
  sleep 1
done
wait "$torchrun"
code=$?

if [ "$code" -ne 0 ]; then
  [ -z "$stopping" ] || code=143 # Nothing was saved before the end; another pod goes on.
elif [ -n "$status" ]; then
  state=$(sed -n 's/^ *"state": "\([a-z]*\)".*/\1/p' "$status" 2>/dev/null)
  [ -z "$stopping" ] || ! is_unchanged || state=preempted
  case $state in
    done) ;;
    failed) code=1 ;;
    *) code=75 ;;
  esac
fi
exit "$code"
