"""python -m tfdist.completion SHELL: prints a script with which bash, zsh or fish complete `tfdist` and its flags.

  eval "$(tfdist completion bash)"          in ~/.bashrc
  eval "$(tfdist completion zsh)"           in ~/.zshrc, after compinit
  tfdist completion fish | source           in ~/.config/fish/config.fish

The script contains the current commands, flags and values: completing starts no Python.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator

from tfdist import comm, doctor, plan, report
from tfdist.__main__ import COMMANDS
from tfdist.config import COMPONENTS, is_switch
from tfdist.config.strategies import STRATEGIES
from tfdist.control import exit_codes
from tfdist.control.command_parser import CommandParser, FlagValues
from tfdist.control.exit_codes import ConfigError
from tfdist.control.jobspecs.job_options import job_parser
from tfdist.data.sources.source_names import SOURCES
from tfdist.launcher.launch_options import launch_parser
from tfdist.models.model_names import MODELS
from tfdist.run.snapshot_evaluation import EvaluateOptions

# The values that may be given instead of `package.module:function`.
NAMES = {"strategy": ("auto", *STRATEGIES), "source": tuple(SOURCES), "model": tuple(MODELS)}


def main(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(
            f"{' '.join(argv) or 'Nothing'!r} is not a supported shell: write tfdist completion {'|'.join(SHELLS)}."
        )
    print(script(argv[0]), end="")
    return 0


def script(shell: str) -> str:
    """Returns the script for one of SHELLS."""
    found, parsers = {}, parsers_before_dashes()
    for name, parser in parsers.items():
        found[name] = parser.flags()
    options_of = {"train": None, "evaluate": EvaluateOptions, "comm": comm.CommOptions, "doctor": doctor.DoctorOptions}
    for name, options in options_of.items():
        found[name] = list(flags_of([*COMPONENTS.values(), *([options] if options else [])]))
    found["completion"] = [FlagValues(name, switch=True) for name in SHELLS]
    places = {
        "commands": " ".join(COMMANDS),
        "kinds": " ".join(job_parser("").kinds()),
        "before_dashes": "|".join(dict.fromkeys(name.partition(" ")[0] for name in parsers if name != "report")),
        "flags": "\n".join(
            _case(shell, name, [flag.name + ("" if flag.switch else "=") for flag in flags])
            for name, flags in found.items()
        ),
        "values": "\n".join(
            _case(shell, f"{name} {flag.name}", flag.values)
            for name, flags in found.items()
            for flag in flags
            if flag.values
        ),
    }
    text = SHELLS[shell]
    for place, value in places.items():
        text = text.replace(f"<{place}>", value)
    return text


def parsers_before_dashes() -> dict[str, CommandParser]:
    """The parsers of the commands that define their flags with argparse; `jobs` has one for each kind of file."""
    jobs = {f"jobs {kind}": parser for kind, parser in job_parser("").kinds().items()}
    return {"launch": launch_parser(""), "plan": plan.plan_parser(), **jobs, "report": report.report_parser()}


def flags_of(components: Iterable[type]) -> Iterator[FlagValues]:
    """Yields the flags that are fields of the configuration."""
    yield FlagValues("--flagfile")
    yield from (FlagValues(name, switch=True) for name in ("--help", "--helpfull", "--version"))
    for kind in components:
        for field in dataclasses.fields(kind):
            switch = is_switch(field)
            yield FlagValues(f"--{field.name}", NAMES.get(field.name, field.metadata["choices"]), switch)
            if switch:
                yield FlagValues(f"--no{field.name}", switch=True)


def _case(shell: str, key: str, words: Iterable[str]) -> str:
    if shell == "fish":
        return f"    case '{key}'\n      string split -- ' ' '{' '.join(words)}'"
    return f"    '{key}') echo '{' '.join(words)}' ;;"


_TABLES = """\
_tfdist_flags() {
  case $1 in
<flags>
  esac
}

_tfdist_values() {
  case $1 in
<values>
  esac
}
"""

SHELLS = {
    "bash": _TABLES
    + """
_tfdist() {
  local line=${COMP_LINE:0:COMP_POINT} words command word flag values part
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  word=${words[${#words[@]}-1]} command=${words[1]} COMPREPLY=()
  if ((${#words[@]} == 2)); then
    COMPREPLY=($(compgen -W "<commands>" -- "$word"))
    return
  elif [[ $command == jobs ]] && ((${#words[@]} == 3)); then
    COMPREPLY=($(compgen -W "<kinds>" -- "$word"))
    return
  fi
  [[ $command == jobs ]] && command="jobs ${words[2]}"
  case ${words[1]} in
    <before_dashes>) for part in "${words[@]:2:${#words[@]}-3}"; do [[ $part == -- ]] && command=train; done ;;
  esac
  if [[ $word == -*=* ]]; then
    flag=${word%%=*}
    values=$(compgen -W "$(_tfdist_values "$command $flag")" -- "${word#*=}")
    # Readline takes what follows the sign as a word of its own, unless it was told otherwise.
    [[ $COMP_WORDBREAKS == *=* ]] || values=${values:+$flag=${values//$'\\n'/$'\\n'$flag=}}
    COMPREPLY=($values)
  elif [[ $word == -* || $command == completion ]]; then
    COMPREPLY=($(compgen -W "$(_tfdist_flags "$command")" -- "$word"))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
  fi
}
complete -o default -F _tfdist tfdist
""",
    "zsh": _TABLES
    + """
_tfdist() {
  local command=$words[2] flag
  if ((CURRENT == 2)); then
    compadd -- <commands>
    return
  elif [[ $command == jobs ]] && ((CURRENT == 3)); then
    compadd -- <kinds>
    return
  fi
  [[ $command == jobs ]] && command="jobs $words[3]"
  case $words[2] in
    <before_dashes>) ((${words[3,CURRENT-1][(Ie)--]})) && command=train ;;
  esac
  if [[ $PREFIX == -*=* ]]; then
    flag=${PREFIX%%=*}
    compset -P '*='
    compadd -- ${=$(_tfdist_values "$command $flag")} || _files
  elif [[ $PREFIX == -* || $command == completion ]]; then
    local -a all=(${=$(_tfdist_flags "$command")})
    compadd -S '' -- ${(M)all:#*=}
    compadd -- ${all:#*=}
  else
    _files
  fi
}
compdef _tfdist tfdist
""",
    "fish": """\
function _tfdist_flags
  switch $argv[1]
<flags>
  end
end

function _tfdist_values
  switch $argv[1]
<values>
  end
end

function _tfdist
  set -l words (commandline -opc)
  set -l word (commandline -ct)
  set -l command $words[2]
  if test (count $words) -eq 1
    string split -- ' ' '<commands>'
    return
  else if test "$command" = jobs
    if test (count $words) -eq 2
      string split -- ' ' '<kinds>'
      return
    end
    set command "jobs $words[3]"
  end
  if string match -qr '^(<before_dashes>)$' -- $words[2]; and contains -- -- $words[3..-1]
    set command train
  end
  if string match -q -- '-*=*' $word
    set -l flag (string split -m 1 = -- $word)[1]
    for value in (_tfdist_values "$command $flag")
      echo "$flag=$value"
    end
  else if string match -q -- '-*' $word; or test "$command" = completion
    _tfdist_flags "$command"
  else
    __fish_complete_path $word
  end
end
complete -c tfdist -f -a '(_tfdist)'
""",
}


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
