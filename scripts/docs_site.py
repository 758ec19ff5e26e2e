"""What `mkdocs build` does to the pages of docs before it renders them.

Formulas become MathML, which browsers draw by themselves, and CHANGELOG.md becomes a page.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHANGES = "changelog.md"
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")
LINK = re.compile(r"\[([^\]]+)\]\(docs/([\w.-]*)[^)]*\)")
FORMULAS = re.compile(r"^```text formulas: \w+\n(.*?)^```$", re.M | re.S)


def on_files(files: Any, config: Any) -> Any:
    """Add the changelog to the pages."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, CHANGES, abs_src_path=str(ROOT / "CHANGELOG.md")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files outside of docs instead of linking to them, and write formulas as MathML."""
    if page.file.src_uri == CHANGES:
        return LINK.sub(_of_a_version, markdown)
    markdown = markdown.replace("(../CHANGELOG.md)", f"({CHANGES})")
    return FORMULAS.sub(lambda found: _table(found[1]), OUTSIDE.sub(r"\1", markdown))


def _of_a_version(link: re.Match[str]) -> str:
    """A link of the changelog to a page as it is now, or its text, if there is no such page now."""
    return f"[{link[1]}]({link[2]})" if (ROOT / "docs" / link[2]).exists() else link[1]


def _table(lines: str) -> str:
    """A table of formulas, each after the name of the function that computes it."""
    rows = (line.split(maxsplit=1) for line in lines.splitlines())
    cells = (f"<tr><td><code>{name}</code></td><td>{mathml(each)}</td></tr>" for name, each in rows)
    return f"<table>{''.join(cells)}</table>"


TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]+'s\b|[A-Za-z]+\d?|<=|\S")
SYMBOLS = {"phi": "φ", "mu": "μ", "beta": "β", "eps": "ε"}
NAMES = {*SYMBOLS, "lr", "rms", "far", "cut", "decay", "min", "max", "sqrt"}
CLOSING = {"(": ")", "[": "]", "|": "|"}
SIGNS = {"<=": "≤", "-": "−"}


def mathml(formula: str) -> str:
    """A line of `horovod_topk/updates/formulas.py` as MathML; words in it stay words."""
    tokens = TOKEN.findall(formula)
    row = _row(tokens, "")
    if tokens:
        raise ValueError(f"{formula!r}: {tokens[0]!r} is not understood")
    return f"<math>{row}</math>"


def _row(tokens: list[str], end: str) -> str:
    """Terms up to a closing bracket, which is taken; each quotient has all factors before it."""
    done, factors = [], list[str]()
    while tokens and tokens[0] != end:
        if tokens[0] == "/":
            tokens.pop(0)
            above = _bare(factors[0]) if len(factors) == 1 else _product(factors)
            below = _words(tokens) if _is_word(tokens[0]) else _bare(_atom(tokens))
            factors = [f"<mfrac><mrow>{above}</mrow><mrow>{below}</mrow></mfrac>"]
        elif _is_word(tokens[0]):
            done += [_product(factors), _words(tokens)]
            factors = []
        elif re.match(r"[\w(\[|]", tokens[0]):
            factors.append(_atom(tokens))
        else:
            sign = tokens.pop(0)
            done += [_product(factors), f"<mo>{html.escape(SIGNS.get(sign, sign))}</mo>"]
            factors = []
    if end and tokens:
        tokens.pop(0)
    return "".join([*done, _product(factors)])


def _product(factors: list[str]) -> str:
    return '<mspace width="0.2em"/>'.join(factors)


def _words(tokens: list[str]) -> str:
    """The words that come next, and the names among them."""
    words = list[str]()
    while tokens and (_is_word(tokens[0]) or (words and tokens[0] in NAMES)):
        words.append(tokens.pop(0))
    return f"<mtext>&nbsp;{' '.join(words)}&nbsp;</mtext>"


def _is_word(token: str) -> bool:
    return len(token) > 1 and token[0].isalpha() and token.rstrip("0123456789") not in NAMES


def _atom(tokens: list[str]) -> str:
    """A number, a name, a root or a bracket, with its primes, index and power."""
    token = tokens.pop(0)
    if token == "sqrt":
        tokens.pop(0)
        found = f"<msqrt>{_row(tokens, ')')}</msqrt>"
    elif token in CLOSING:
        close = CLOSING[token]
        found = f"<mrow><mo>{token}</mo>{_row(tokens, close)}<mo>{close}</mo></mrow>"
    elif token[0].isdigit():
        found = f"<mn>{token}</mn>"
    else:
        name, digit = token.rstrip("0123456789"), token[len(token.rstrip("0123456789")) :]
        found = f"<mi>{SYMBOLS.get(name, name)}</mi>"
        found = f"<msub>{found}<mn>{digit}</mn></msub>" if digit else found
    while tokens and tokens[0] in ("'", '"', "_", "^"):
        mark = tokens.pop(0)
        if mark in "_^":
            kind = "msub" if mark == "_" else "msup"
            found = f"<{kind}>{found}<mrow>{_bare(_atom(tokens))}</mrow></{kind}>"
        else:
            found = f"<msup>{found}<mo>{'′' if mark == chr(39) else '″'}</mo></msup>"
    return found


def _bare(found: str) -> str:
    """Without round brackets around all of it."""
    inner = found.removeprefix("<mrow><mo>(</mo>").removesuffix("<mo>)</mo></mrow>")
    return inner if len(found) - len(inner) == len("<mrow><mo>(</mo><mo>)</mo></mrow>") else found
