"""Hooks of `mkdocs build`, which change the pages of docs before they are rendered.

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
    """Return a link of the changelog to a page that exists, or else the link's text."""
    return f"[{link[1]}]({link[2]})" if (ROOT / "docs" / link[2]).exists() else link[1]


def _table(lines: str) -> str:
    """Return formulas as a table, each after the name of the function that computes it."""
    rows = (line.split(maxsplit=1) for line in lines.splitlines())
    cells = (f"<tr><td><code>{name}</code></td><td>{mathml(each)}</td></tr>" for name, each in rows)
    return f"<table>{''.join(cells)}</table>"


TOKEN = re.compile(r"\d+(?:\.\d+)?|[A-Za-z]+'s\b|[A-Za-z]+\d?|<=|\S")
SYMBOLS = {"phi": "φ", "mu": "μ", "beta": "β", "eps": "ε"}
NAMES = {*SYMBOLS, "lr", "rms", "far", "cut", "decay", "min", "max", "sqrt"}
CLOSING = {"(": ")", "[": "]", "|": "|"}
SIGNS = {"<=": "&le;", "-": "&minus;", "'": "&prime;", '"': "&Prime;"}
SPACE, BELOW_ALL = '<mspace width="0.2em"/>', "</mrow></mfrac>"
QUOTIENT = re.compile(r"<mfrac><mrow>(.*?)</mrow><mrow>(.*?)</mrow></mfrac>")


def mathml(formula: str) -> str:
    """Return a line of `horovod_topk/updates/formulas.py` as MathML; words in it stay words."""
    tokens = TOKEN.findall(formula)
    return f'<math displaystyle="true">{_row(tokens, "")}</math>'


def _row(tokens: list[str], end: str) -> str:
    """Parse terms up to a closing bracket; a quotient divides all factors before its slash."""
    done, factors, quotient = [], list[str](), ""
    while tokens and tokens[0] != end:
        if tokens[0] == "/":
            tokens.pop(0)
            below = _words(tokens) if _is_word(tokens[0]) else _atom(tokens)
            if factors == [quotient]:  # a / b / c is a / (b c)
                quotient = f"{quotient.removesuffix(BELOW_ALL)}{SPACE}{below}{BELOW_ALL}"
            else:
                above = _bare(factors[0]) if len(factors) == 1 else _product(factors)
                quotient = f"<mfrac><mrow>{above}</mrow><mrow>{_bare(below)}{BELOW_ALL}"
            factors = [quotient]
        elif _is_word(tokens[0]):
            done += [_product(factors), _words(tokens)]
            factors = []
        elif re.match(r"[\w(\[|]", tokens[0]):
            factors.append(_atom(tokens))
        elif tokens[0] in CLOSING.values():
            raise ValueError(f"a {tokens[0]!r} that nothing opens")
        else:
            sign = tokens.pop(0)
            done += [_product(factors), f"<mo>{SIGNS.get(sign, html.escape(sign))}</mo>"]
            factors = []
    if end and not tokens:
        raise ValueError(f"no {end!r} at the end")
    del tokens[:1]
    return "".join([*done, _product(factors)])


def _product(factors: list[str]) -> str:
    return SPACE.join(factors)


def _words(tokens: list[str]) -> str:
    """Parse the words that come next, with the names among them."""
    words = list[str]()
    while tokens and (_is_word(tokens[0]) or (words and tokens[0] in NAMES)):
        words.append(tokens.pop(0))
    return f"<mtext>&nbsp;{' '.join(words)}&nbsp;</mtext>"


def _is_word(token: str) -> bool:
    return len(token) > 1 and token[0].isalpha() and token.rstrip("0123456789") not in NAMES


def _atom(tokens: list[str]) -> str:
    """Parse a number, a name, a root or a bracket, with its primes, index and power."""
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
        if mark == "_":
            found = f"<msub>{found}<mrow>{_bare(_atom(tokens))}</mrow></msub>"
        elif mark == "^":
            power = QUOTIENT.sub(r"\1<mo>/</mo>\2", _bare(_atom(tokens)))
            found = f"<msup>{found}<mrow>{power}</mrow></msup>"
        else:
            found = f'<mrow>{found}<mo lspace="0" rspace="0">{SIGNS[mark]}</mo></mrow>'
    return found


def _bare(found: str) -> str:
    """Remove round brackets around a whole expression."""
    inner = found.removeprefix("<mrow><mo>(</mo>").removesuffix("<mo>)</mo></mrow>")
    return inner if len(found) - len(inner) == len("<mrow><mo>(</mo><mo>)</mo></mrow>") else found
