"""The rules of a free answer in which calls of some tools have inputs that follow grammars.

An answer is text with added tokens in it. llguidance matches text by regular expressions and tokens by their ids, so a
header that holds such tokens is divided at them, and what may be text depends on what stands before it: behind a token
with which headers begin, no text names a tool as the reader would understand it. The rules are those of a state machine
whose state is what the answer has ended with so far. They are left-recursive, so that a long answer costs no more than
a short one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from infer.contracts.text import CallForm
from infer_llguidance.lark import escaped

Part = tuple[int, str, str, str | None]
"""The index of a tool, what stands before and after its input, and what the input does not hold."""
_SPACES = r"[\s\x1c-\x1f]*"
"""What the parsers of answers take for white space."""


class _State(NamedTuple):
    """What an answer has ended with so far."""

    rule: str
    """The rule for all of the answer so far; empty at its beginning."""
    without: Sequence[str]
    """Regular expressions for texts that may not come next."""
    begins: str | None = ""
    """A regular expression for how the text begins that may come next. None: no text may."""
    tokens: Collection[int] | None = None
    """The tokens that may come next without text before them; None if all may."""


class FreeRules:
    """Rules for answers that call tools of these ``names`` in these ``forms``. ``visible`` tokens are part of an
    answer's text, ``hidden`` ones are not; those that end answers are in neither."""

    def __init__(
        self, forms: Sequence[CallForm], names: Sequence[str], visible: Mapping[str, int], hidden: Mapping[str, int]
    ) -> None:
        self._forms, self._names = forms, names
        self._visible, self._hidden = visible, hidden
        self._rules: dict[str, list[str]] = {}
        self._terminals: list[str] = []
        self.parts: dict[Part, str] = {}
        """The inputs that the rules refer to, with the names of their grammars. ``lines`` fills it."""

    def lines(self, tags: Sequence[str] | None, *, opened: bool) -> list[str]:
        """The rules of an answer that may begin with reasoning between ``tags``, or within it."""
        begin = self._thought(tags, opened) if tags else ""
        states = self._states(begin)
        names = ["start", "free", "ended", "called", *(state.rule for state in states if state.rule != begin)]
        self._rules |= {name: self._rules.get(name, []) for name in names}
        if states[0].rule == "free":
            self._rules["free"].append(begin or '""')
        for n, state in enumerate(states):
            if state.begins is not None:
                # One expression for all of them takes a fraction of the time that several do.
                self._terminals.append(f"FREE-{n}: /(?s:.*)/ & ~/{'|'.join(dict.fromkeys(state.without))}/")
                self._terminals.append(f"TEXT-{n}: /(?s:.+)/ & FREE-{n}{_begun(state)}")
            self._step(n, state)
        for form in self._forms:
            for tool in range(len(self._names)):
                self._call(form, tool, states)
        while empty := [name for name, ways in self._rules.items() if not ways]:  # which no answer comes to
            self._rules = {
                name: [way for way in ways if way.split(" ")[0] not in empty]
                for name, ways in self._rules.items()
                if ways
            }
        return [*(f"{name}: {' | '.join(ways)}" for name, ways in self._rules.items()), *self._terminals]

    def _states(self, begin: str) -> list[_State]:
        """The states. The first is the beginning, or any place if a form makes no difference."""
        anywhere, first, spelled = [], [], []
        behind: dict[str | int, list[str]] = {}
        for form in self._forms:
            named = form.named.replace("NAME", f"({'|'.join(map(escaped, self._names))})")
            if named.startswith("^"):
                first.append(_joined(divided(named[1:], form.marks, {})))
                continue
            for text in (named, form.header):
                begins, *rest = divided(text, form.marks, self._visible)
                if rest and not begins:
                    behind.setdefault(rest[0], []).extend([str(rest[1])] if text is named else [])
                    spelled.extend([rest[0]] if text is named else [])
                elif text is named:
                    anywhere.append(f"(?s:.*)({begins})")
        marks = "|".join(escaped(mark) for mark, id in self._visible.items() if id in spelled)
        anywhere += [f"(?s:.*)({marks})(?s:.*)"] if marks else []  # what names no tool as a token is not written out
        following = {mark for form in self._forms for mark in form.following}
        tokens = {**self._visible, **self._hidden}
        texts = "|".join(escaped(mark) for mark in sorted(following) if mark not in tokens)
        ids = {tokens[mark] for mark in following if mark in tokens}
        return [
            *([_State(begin, [*anywhere, *first])] if first else []),
            _State("free", anywhere),
            *(_State(f"after-{id}", [*anywhere, *more]) for id, more in behind.items()),
            _State("ended", [], None),
            _State("called", anywhere, f"({texts})" if texts else None, ids),
        ]

    def _step(self, n: int, state: _State) -> None:
        """Add the ways to go on from a state with text and a token, or to end there."""
        if state.begins is None:
            ways = [(state.rule, state.tokens)]
        elif state.tokens is None:
            ways = [(f"{state.rule} TEXT-{n}?", None)]
        else:
            ways = [(state.rule, state.tokens), (f"{state.rule} TEXT-{n}", None)]
        for way, tokens in ways:
            self._rules["start"].append(way)
            shown, hidden = (
                [id for id in ids.values() if tokens is None or id in tokens] for ids in (self._visible, self._hidden)
            )
            for id in shown:
                if f"after-{id}" in self._rules:
                    self._rules[f"after-{id}"].append(f"{way} {any_of([id])}")
            if plain := [id for id in shown if f"after-{id}" not in self._rules]:
                self._rules["free"].append(f"{way} {any_of(plain)}")
            if hidden:
                self._rules["ended" if tokens is None else "called"].append(f"{way} {any_of(hidden)}")

    def _call(self, form: CallForm, tool: int, states: Sequence[_State]) -> None:
        """Add the ways to call a tool."""
        header, before, after = (
            text.replace("NAME", escaped(self._names[tool])) for text in (form.header, form.before, form.after)
        )
        begins, *rest = divided(header.removeprefix("^"), form.marks, self._visible)
        pieces = divided(header.removeprefix("^") + before, form.marks, self._visible)
        if header.startswith("^"):
            way = states[0].rule
        elif rest and not begins:
            way, pieces = f"after-{rest[0]}", pieces[2:]
        else:
            way = f"head-{len(self._rules)}"
            self._rules[way] = []
            # Where another form's header ends so, it is that one.
            others = [each.header for each in self._forms if each != form and each.header.endswith(form.header)]
            longer = [
                _joined(divided(each, form.marks, {})).replace("NAME", escaped(self._names[tool])) for each in others
            ]
            without = f" & ~/(?s:.*)({'|'.join(longer)})/" if longer else ""
            for n, state in enumerate(states):
                if state.begins is None:
                    continue
                terminal = f"{way}-{n}".upper()
                self._terminals.append(f"{terminal}: (FREE-{n} /{begins}/){_begun(state)}{without}")
                if not rest:  # what follows is text, too, so that this ends as soon as it can
                    self._rules[f"{way}-{n}[lazy]"] = [terminal]
                self._rules[way].append(f"{state.rule} {terminal if rest else f'{way}-{n}'}")
            pieces = ["", *pieces[1:]] if rest else divided(before, form.marks, self._visible)
        behind = divided(after, form.marks, self._visible)
        around = (tool, str(pieces[-1]), str(behind[0]), form.closing)
        part = self.parts.setdefault(around, f"part-{len(self.parts)}")
        call = " ".join([way, sequence(pieces[:-1]), f"@{part}", sequence(behind[1:])])
        self._rules["called" if form.following else "free"].append(call)

    def _thought(self, tags: Sequence[str], opened: bool) -> str:
        """Add the rules of reasoning. Returns those for the beginning of an answer."""
        opening, closing = tags
        first, *rest = divided(opening, [*self._visible], self._visible, escaped)
        last = escaped(closing)
        others = [id for text, id in self._visible.items() if text != closing]
        inside = f"(THOUGHT? {any_of(others)})*" if others else '""'
        end = f"THOUGHT? {any_of([self._visible[closing]])}" if closing in self._visible else "closed"
        self._terminals += [
            f"inside: {inside}",
            f"begun: inside {end}",
            f"thought: {f'/{_SPACES}{first}/ {sequence(rest)}' if rest else 'opened'} begun",
            f"opened[lazy]: /{_SPACES}{first}/",
            f"closed[lazy]: /(?s:.*){last}/",
            f"THOUGHT: /(?s:.+)/ & ~/(?s:.*){last}(?s:.*)/",
        ]
        if opened:
            self._rules["start"] = ["inside THOUGHT?"]
        return "begun thought*" if opened else "thought*"


def divided(
    text: str, marks: Collection[str], tokens: Mapping[str, int], plain: Callable[[str], str] = str
) -> list[str | int]:
    """A regular expression divided at those of ``marks`` that are ``tokens``: expressions and ids by turns, with an
    expression at both ends. ``plain`` makes expressions of what is no mark."""
    found: list[str | int] = [""]
    for i, part in enumerate(re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]):
        if i % 2 and part in tokens:
            found += [tokens[part], ""]
        else:
            found[-1] = f"{found[-1]}{escaped(part) if i % 2 else plain(part)}"
    return found


def _joined(pieces: Sequence[str | int]) -> str:
    return "".join(map(str, pieces))


def sequence(pieces: Sequence[str | int]) -> str:
    return " ".join(any_of([piece]) if isinstance(piece, int) else f"/{piece}/" for piece in pieces if piece != "")


def _begun(state: _State) -> str:
    """What the text in a state is intersected with, besides."""
    return f" & /{state.begins}(?s:.*)/" if state.begins else ""


def any_of(ids: Collection[int]) -> str:
    return f"<[{','.join(map(str, ids))}]>"
