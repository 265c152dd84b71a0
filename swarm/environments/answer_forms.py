"""The strict reading of an answer to a reasoning-gym dataset: the whole text is the answer, or it is wrong.

reasoning-gym's scorers find an answer inside other text, round, and read `nan` as a number; a peer could make other
nodes learn from these texts. Invariant: in a dataset that is not listed here, only the reference is right, letter for
letter; a listed dataset also accepts equal values (`READ`), texts that a rule of this module accepts (`JUDGED`), or
texts of a form that its own scorer then judges (`FORM`, some with a further rule in `ALSO`).
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, Final

from swarm.environments.formulas import exact_value, is_integral

Entry = Mapping[str, Any]  # of reasoning-gym: question, answer, metadata
Read = Callable[[str], object]  # the value that a text stands for; None or ValueError where it stands for none
Rule = Callable[[str, Entry], bool]

_LONGER: Final = 16  # characters that an answer may have beyond twice the length of its reference
_MAX_CHARS: Final = 4000  # of an answer without a reference
_NUMBER: Final = r"[-+]?(?:[0-9]{1,25}|[0-9]{1,3}(?:,[0-9]{3}){1,8})(?:\.[0-9]{0,24})?"
_PLAIN_NUMBER: Final = r"[-+]?[0-9]{1,25}(?:\.[0-9]{0,24})?"


def is_right(dataset: str, answer: str, reference: str, entry: Entry, score: Callable[[str], float]) -> bool:
    """True if an answer is right as a whole.

    Args:
        dataset: name of the dataset.
        answer: hostile text, without surrounding white space; an empty one is wrong.
        reference: right answer as text; "" if the dataset has none.
        entry: problem as reasoning-gym made it.
        score: scorer of the dataset; called only for an answer that matches the dataset's pattern in `FORM`.
    """
    if answer == reference.strip():
        return bool(answer)
    if len(answer) > (2 * len(reference) + _LONGER if reference else _MAX_CHARS):
        return False
    if dataset in READ:
        value = _value(READ[dataset], answer)
        return value is not None and value == _value(READ[dataset], reference)
    if dataset in JUDGED:
        return JUDGED[dataset](answer, entry)
    form, holds = FORM.get(dataset), ALSO.get(dataset)
    if form is None or not form.fullmatch(answer) or (holds is not None and not holds(answer, entry)):
        return False
    return score(answer) >= 1.0


def _value(read: Read, text: str) -> object:
    with suppress(ValueError, ArithmeticError, RecursionError):
        return read(text.strip())
    return None


def _list_of(item: str, opens: str = r"\[", closes: str = r"\]") -> str:
    return rf"{opens}\s*{item}(?:\s*,\s*{item})*\s*{closes}"


# --- values -------------------------------------------------------------------------------------


def _caseless(text: str) -> object:
    return " ".join(text.lower().split())


def _number(text: str) -> object:
    return Decimal(text.replace(",", "")) if re.fullmatch(_NUMBER, text) else None


def _ratio(text: str) -> object:
    parts = text.split("/")
    if len(parts) > 2 or not all(re.fullmatch(_PLAIN_NUMBER + "(?:e[-+]?[0-9]{1,2})?", part.strip()) for part in parts):
        return None
    return Fraction(parts[0].strip()) / Fraction(parts[-1].strip() if len(parts) == 2 else 1)


def _numbers(text: str) -> list[Decimal] | None:
    parts = [part.strip() for part in text.split(",")]
    return [Decimal(part) for part in parts] if all(re.fullmatch(_PLAIN_NUMBER, part) for part in parts) else None


def _sorted_numbers(text: str) -> object:
    numbers = _numbers(text)
    return None if numbers is None else sorted(numbers)


def _three_figures(text: str) -> object:
    is_number = re.fullmatch(_PLAIN_NUMBER + r"(?:[eE][-+]?[0-9]{1,3})?", text)
    return Context(prec=3).create_decimal(text) if is_number else None


def _hexadecimal(text: str) -> object:
    return int(text, 0) if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]{1,40}|[0-9]{1,40})", text) else None


def _complex(text: str) -> object:
    pattern = rf"\(?(?P<real>{_PLAIN_NUMBER}(?=$|[-+)]))?(?P<imaginary>[-+]?[0-9]{{0,25}}(?:\.[0-9]{{0,24}})?i)?\)?"
    parts = re.fullmatch(pattern, re.sub(" ?([-+]) ?", r"\1", text))
    if parts is None or not (parts["real"] or parts["imaginary"]):
        return None
    imaginary = (parts["imaginary"] or "0i")[:-1]
    return Decimal(parts["real"] or 0), Decimal(imaginary + "1" if imaginary in ("", "-", "+") else imaginary)


def _rows(text: str) -> object:
    return [line.split() for line in text.splitlines()]


def _number_rows(text: str) -> object:
    rows = [line.split() for line in text.splitlines()]
    is_numbers = all(re.fullmatch(_PLAIN_NUMBER, cell) for row in rows for cell in row)
    return [[Decimal(cell) for cell in row] for row in rows] if is_numbers else None


def _lines(text: str) -> object:
    return [line.rstrip() for line in text.splitlines()]


def _number_list(text: str) -> object:
    item = rf"(?:'{_PLAIN_NUMBER}'|\"{_PLAIN_NUMBER}\"|{_PLAIN_NUMBER})"
    return _numbers(re.sub("[]['\"]", "", text)) if re.fullmatch(_list_of(item), text) else None


def _json_numbers(text: str) -> object:
    return json.loads(text) if re.fullmatch(r"[][0-9,\s]*", text) else None


def _groups_of_words(text: str) -> object:
    return None if (groups := _lists_of_words(text)) is None else sorted(sorted(group) for group in groups)


def _set_of_lists(text: str) -> object:
    return None if (lists := _lists_of_words(text)) is None else sorted(lists)


def _lists_of_words(text: str) -> list[list[str]] | None:
    # a plain list of lists of plain words, so that nothing else passes for one of JSON's values
    row = r'\[\s*"[^"\\]*"(?:\s*,\s*"[^"\\]*")*\s*\]'
    return json.loads(text) if re.fullmatch(rf"\[\s*{row}(?:\s*,\s*{row})*\s*\]", text) else None


def _words(text: str) -> object:
    return [word.strip() for word in text.split(",")]


def _factors(text: str) -> object:
    parts = [part.strip() for part in text.split("\u00d7")]
    return sorted(map(int, parts)) if all(re.fullmatch("[0-9]{1,30}", part) for part in parts) else None


def _fraction(text: str) -> object:
    plain = text[1:-1].strip() if len(text) > 2 and text[0] == text[-1] == "$" else text
    parts = re.fullmatch(r"([0-9]{1,30}) ?/ ?([0-9]{1,30})", plain)
    parts = parts or re.fullmatch(r"\\d?frac ?\{ ?([0-9]{1,30}) ?\} ?\{ ?([0-9]{1,30}) ?\}", plain)
    return None if parts is None else (int(parts[1]), int(parts[2]))


def _roles(text: str) -> object:
    claim = r"[A-Za-z]+ is (?:an? )?[A-Za-z]+"
    is_whole = re.fullmatch(rf"{claim}(?:(?:,| and|, and) {claim})*\.?", text)
    return sorted(re.findall(claim, text.lower())) if is_whole else None


def _coordinates(text: str) -> object:
    is_bracketed = text[:1] == "(" and text[-1:] == ")"
    return _numbers(text[1:-1] if is_bracketed else text.removesuffix("\u00b0"))


def _calendar(text: str) -> object:
    return _number(text) if text[:1] in "-+0123456789" else text.lower() if text.lower() in ("yes", "no") else text


READ: Final[Mapping[str, Read]] = {
    "advanced_geometry": _coordinates,
    "arc_agi": _rows,
    "bitwise_arithmetic": _hexadecimal,
    "calendar_arithmetic": _calendar,
    "chain_sum": _number,
    "coin_flip": _ratio,
    "color_cube_rotation": _caseless,
    "complex_arithmetic": _complex,
    "decimal_arithmetic": _number,
    "decimal_chain_sum": _number,
    "dice": _caseless,
    "family_relationships": _caseless,
    "figlet_font": _caseless,
    "fraction_simplification": _fraction,
    "futoshiki": _lines,
    "game_of_life": _json_numbers,
    "game_of_life_halting": _caseless,
    "group_anagrams": _groups_of_words,
    "gsm_symbolic": _number,
    "knights_knaves": _roles,
    "letter_jumble": _caseless,
    "manipulate_matrix": _rows,
    "mini_sudoku": _rows,
    "needle_haystack": _caseless,
    "number_format": _number,
    "number_sorting": _number_list,
    "palindrome_partitioning": _set_of_lists,
    "path_star": _caseless,
    "polynomial_equations": _sorted_numbers,
    "pool_matrix": _number_rows,
    "power_function": _three_figures,
    "prime_factorization": _factors,
    "products": _number,
    "rearc": _rows,
    "rectangle_count": _number,
    "spell_backward": _caseless,
    "sudoku": _rows,
    "survo": _rows,
    "time_intervals": _caseless,
    "tsumego": _caseless,
    "word_sorting": _words,
    "zebra_puzzles": _caseless,
}

# --- puzzles with many right answers ---------------------------------------------------------------


def _reaches(answer: str, numbers: list[int], target: int) -> bool:
    worth = exact_value(answer)
    return worth is not None and worth == (target, sorted(numbers))


def _is_integral(answer: str, entry: Entry) -> bool:
    return is_integral(answer, entry["metadata"]["integrand"], entry["metadata"]["variable"])


JUDGED: Final[Mapping[str, Rule]] = {
    "intermediate_integration": _is_integral,
    "simple_integration": _is_integral,
    # reasoning-gym's own scorers accept 24.9 for 24, any four numbers, and 1.5 for the numbers 1 and 5
    "countdown": lambda answer, entry: _reaches(answer, entry["metadata"]["numbers"], entry["metadata"]["target"]),
    "puzzle24": lambda answer, entry: _reaches(answer, entry["metadata"]["numbers"], 24),
}


_JUG_MOVE: Final = r'"(?:fill [A-Z]|empty [A-Z]|pour [A-Z]->[A-Z])"'
_SQUARE: Final = r"\[[0-9]\.5, [0-9]\.5\]"
_BOX_MOVE: Final = rf'"Agent{_SQUARE}"\s*:\s*"move\(box_[a-z]+, (?:square{_SQUARE}|target_[a-z]+)\)"'
_DISK_MOVE: Final = r"Move disk [0-9]{1,2} from Peg [0-9]{1,2} to Peg [0-9]{1,2}"

FORM: Final[Mapping[str, re.Pattern[str]]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "boxnet": _list_of(_list_of(_BOX_MOVE, r"\{", r"\}")),
        "cryptarithm": r"[A-Z]=[0-9](?:\s?,\s?[A-Z]=[0-9])*",
        "graph_color": _list_of(r'"[0-9]{1,3}"\s*:\s*[0-9]{1,3}', r"\{", r"\}"),
        "jugs": _list_of(_JUG_MOVE),
        "kakurasu": r"[01](?: [01])*(?:\n[01](?: [01])*)*",
        "n_queens": r"[Q_](?: [Q_])*(?:\n[Q_](?: [Q_])*)*",
        "palindrome_generation": r"[A-Za-z]+",
        "propositional_logic": "[A-Z() \u00ac\u2227\u2228\u2192\u2194]{1,200}",
        "quantum_lock": "[A-C](?: ?(?:\u2192|->) ?[A-C])*",
        "rubiks_cube": r"[UDLRFB]'?(?: [UDLRFB]'?){0,400}",
        "rush_hour": r"[A-Z][-+][1-9](?: [A-Z][-+][1-9]){0,200}",
        "shortest_path": r"(?:up|down|left|right)(?: (?:up|down|left|right))*",
        "sokoban": r"[UDLR]+",
        "tower_of_hanoi": rf"{_DISK_MOVE}(?:\n{_DISK_MOVE})*",
    }.items()
}


def _names_each_letter_once(answer: str, entry: Entry) -> bool:
    return max(Counter(re.findall("[A-Z]", answer)).values()) == 1


def _colours_each_vertex_once(answer: str, entry: Entry) -> bool:
    named = sorted(map(int, re.findall(r'"([0-9]+)"', answer)))
    return named == sorted(entry["metadata"]["puzzle"]["vertices"])


def _is_logic(answer: str, entry: Entry) -> bool:
    """True for a well-formed formula over the variables of the entry, whichever operators join its parts."""
    python = answer.replace("\u00ac", " not ")
    for sign in "\u2227\u2228\u2192\u2194":
        python = python.replace(sign, " and ")
    with suppress(SyntaxError, MemoryError, RecursionError):
        nodes = ast.walk(ast.parse(python.strip(), mode="eval"))
        return all(
            isinstance(n, ast.Expression | ast.BoolOp | ast.UnaryOp | ast.Name | ast.And | ast.Not | ast.Load)
            and (not isinstance(n, ast.Name) or n.id in entry["metadata"]["variables"])
            for n in nodes
        )
    return False


ALSO: Final[Mapping[str, Rule]] = {
    "cryptarithm": _names_each_letter_once,
    "graph_color": _colours_each_vertex_once,
    "propositional_logic": _is_logic,
}
