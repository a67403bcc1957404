"""`lagom completion SHELL`: a script by which a shell completes verbs, flags and values; written from the parser."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Final

from lagom_overlap.cli.main import full_parser
from lagom_overlap.cli.stdout import say

_MORE: Final = re.compile(r";(?![^(]*\))")
"""Where a flag's help goes on to what a list has no room for; not within brackets."""


@dataclass(frozen=True, slots=True)
class _Flag:
    """A flag as a shell offers it; `choices` are its values where these are few and known."""

    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Verb:
    """A verb; `choices` are those of its first argument, and without any that is a file."""

    name: str
    help: str
    flags: tuple[_Flag, ...]
    choices: tuple[str, ...]


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    say({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](tuple(_verbs())))
    return 0


def _verbs() -> Iterator[_Verb]:
    _, verbs = full_parser()
    helps = {action.dest: action.help or "" for action in verbs._choices_actions}
    for name, parser in verbs.choices.items():
        flags: list[_Flag] = []
        choices: tuple[str, ...] = ()
        for action in parser._actions:
            values = tuple(map(str, action.choices or ()))
            if not action.option_strings:
                choices = choices or values
            else:
                takes_value, words = action.nargs != 0, _MORE.split(action.help or "", maxsplit=1)[0]
                flags += [_Flag(word, words, takes_value, values) for word in action.option_strings if word[:2] == "--"]
        yield _Verb(name, helps.get(name, ""), tuple(flags), choices)


def _words(words: Iterator[str] | tuple[str, ...]) -> str:
    return quote(" ".join(words))


def _bash(verbs: tuple[_Verb, ...]) -> str:
    lines = [
        '# Bash completion of lagom. Load it: eval "$(lagom completion bash)"',
        "_lagom() {",
        "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=",
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    words={_words(verb.name for verb in verbs)}",
        "  else",
        '    case "${COMP_WORDS[1]} $prev" in',
    ]
    for verb in verbs:
        lines += [
            f"      {quote(f'{verb.name} {f.name}')}) words={_words(f.choices)};;" for f in verb.flags if f.choices
        ]
    lines += ["    esac", '    if [ -z "$words" ]; then case "${COMP_WORDS[1]} $cur" in']
    for verb in verbs:
        lines.append(f"      {quote(verb.name)}\\ -*) words={_words(f.name for f in verb.flags)};;")
        if verb.choices:
            lines.append(f"      {quote(verb.name)}\\ *) words={_words(verb.choices)};;")
    lines += [
        "    esac; fi",
        "  fi",
        '  if [ -n "$words" ]; then',
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "  fi",
        "}",
        "complete -o default -F _lagom lagom",  # without a word of ours: files
    ]
    return "\n".join(lines)


def _zsh(verbs: tuple[_Verb, ...]) -> str:
    def described(name: str, words: str) -> str:
        return quote(f"{name}:{words}".replace("\n", " "))

    lines = [
        "#compdef lagom",
        "# Zsh completion of lagom. Load it after compinit: source <(lagom completion zsh)",
        "_lagom() {",
        "  local -a verbs flags",
        f"  verbs=({' '.join(described(verb.name, verb.help) for verb in verbs)})",
        "  if (( CURRENT == 2 )); then _describe verb verbs; return; fi",
        '  case "$words[2] $words[CURRENT-1]" in',
    ]
    for verb in verbs:
        for flag in verb.flags:
            if flag.choices:
                values = " ".join(map(quote, flag.choices))
                lines.append(f"    {quote(f'{verb.name} {flag.name}')}) compadd -- {values}; return;;")
    lines += ["  esac", "  case $words[2] in"]
    for verb in verbs:
        lines.append(f"    {verb.name}) flags=({' '.join(described(f.name, f.help) for f in verb.flags)})")
        values = f"; compadd -- {' '.join(map(quote, verb.choices))}" if verb.choices else ""
        lines.append(f"      [[ $PREFIX == -* ]] && _describe flag flags || {{ _files{values}; }};;")
    return "\n".join([*lines, "  esac", "}", "compdef _lagom lagom"])


def _fish(verbs: tuple[_Verb, ...]) -> str:
    lines = ["# Fish completion of lagom. Load it: lagom completion fish | source"]
    for verb in verbs:
        lines.append(f"complete -c lagom -n __fish_use_subcommand -f -a {quote(verb.name)} -d {_fish_text(verb.help)}")
        here = f"complete -c lagom -n {_fish_text(f'__fish_seen_subcommand_from {verb.name}')}"
        for flag in verb.flags:
            value = (
                f" -x -a {_fish_text(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes_value else ""
            )
            lines.append(f"{here} -l {flag.name[2:]}{value} -d {_fish_text(flag.help)}")
        if verb.choices:
            lines.append(f"{here} -f -a {_fish_text(' '.join(verb.choices))}")
    return "\n".join(lines)


def _fish_text(text: str) -> str:
    """A text in fish's single quotes, in which a backslash escapes quotes and itself."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
