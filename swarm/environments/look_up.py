"""Look-up in two hops, in tables that the environment holds: the place of a person, then the thing sold there.

Invariant: a turn is one search or the answer; the answer is one word and nothing else, so that naming every
thing of the table earns nothing. In style `char` every text is made of the characters of the tiny model.
"""

import random
import re
from dataclasses import dataclass, replace
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.episode import OUTCOME, Action, Actions, Message, Transition, TurnStatus
from swarm.errors import ConfigError

TOOL: Final = "search"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_NAMES: Final = (
    "Ada Ben Cora Dan Eva Finn Gina Hugo Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Uwe Vera Will Yara Zoe"
)
_SURNAMES: Final = (
    "Abbot Baker Cook Dyer Fisher Glover Hunter Joiner Knight Mason Miller Porter Smith Tailor Weaver Wood"
)
_CITIES: Final = (
    "Athens Berlin Cairo Dublin Exeter Florence Geneva Helsinki Istanbul Jaipur Kyoto Lima Madrid Nairobi Oslo Paris "
    "Quito Rome Seoul Tunis Utrecht Vienna Warsaw York"
)
_GOODS: Final = (
    "apples bread cheese dates eggs flour ginger honey ink jam knives lamps milk nuts oil paper quilts rice soap tea "
    "umbrellas vases wool yarn"
)
_ANSWER: Final = re.compile(r"(?:answer: ?)?([a-z]{1,20})\.?", re.IGNORECASE | re.ASCII)
_SEARCH: Final = re.compile(r"search[: ] ?([a-z]{1,20}(?: [a-z]{1,20})?)\.?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Places of people and the things sold there; the question is about the first person."""

    where: dict[str, str]  # person -> place
    what: dict[str, str]  # place -> thing

    @property
    def chain(self) -> tuple[str, str, str]:
        """Person, place and thing on the path from the question to its answer."""
        person, place = next(iter(self.where.items()))
        return person, place, self.what[place]


class LookUpEnvironment(NumberedEnvironment):
    """Questions for the thing that is sold where a person lives, answered by two searches.

    Params: `people` (6: rows of each table), `style` (text, or char), `length` (3: letters of a word in style char),
    `max_turns` (5). Actions: a search (`search Ada Cook`, or a call of `search` with `query`; in style char `?abc`), or
    the answer (`Answer: tea`; in style char `def`), which ends the episode. Rewards: outcome 1 for the right thing,
    `found` the share of the two hops that were searched; the first search of each hop earns its turn 0.5.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the params. Raises ConfigError for a param that is unknown or out of bounds."""
        params = Params(config)
        self._people = params.integer("people", 6, 1, 20)
        self.style = params.choice("style", "text", ("text", "char"))
        self._length = params.integer("length", 3, 2, 8)
        self.max_turns = params.turns(5)
        self.signals = frozenset({"turn_rewards", "state_keys", "tool_calls", "reward_parts"})
        params.finish()
        if self.style == "char" and self._length == 2 and self._people > 12:
            raise ConfigError(f"environment {config.name}: params.length 2 has too few words for {self._people} people")
        super().__init__(config, verifier_name(config, 1))

    def build(self, task_id: int) -> Problem:
        """Problem with random tables and a question about their first person."""
        source, count = random.Random(f"{self.config.seed}:{task_id}"), self._people
        if self.style == "char":
            words: dict[str, None] = {}
            while len(words) < 3 * count:
                words["".join(source.choice(_LETTERS) for _ in range(self._length))] = None
            drawn = list(words)
            names, places, things = drawn[:count], drawn[count : 2 * count], drawn[2 * count :]
        else:
            names, places, things = (source.sample(each.split(), count) for each in (_NAMES, _CITIES, _GOODS))
            names = [f"{name} {source.choice(_SURNAMES.split())}" for name in names]
        table = Table(
            where={name: source.choice(places) for name in names}, what=dict(zip(places, things, strict=True))
        )
        person, _, thing = table.chain
        return Problem(
            question=f"get:{person}=" if self.style == "char" else _question(person),
            reference=thing,
            entry=table,
            initial_state=f"{table.where} {table.what}",
        )

    def begin(self, problem: Problem) -> "LookUp":
        """Starts an episode, without any searches so far."""
        return LookUp(problem.entry, is_char=self.style == "char")

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward. Raises as `problem`."""
        person, place, thing = self.problem(task_id).entry.chain
        if self.style == "char":
            return f"?{person}", f"?{place}", thing
        return f"search {person}", f"search {place}", f"Answer: {thing}"


def _question(person: str) -> str:
    return (
        "Search for what you need, then answer with one word.\n\n"
        "Example\nQuestion: What is sold where Xaver Potter lives?\nYou: search Xaver Potter\n"
        "Table: Xaver Potter lives in Zagreb.\n"
        "You: search Zagreb\nTable: Zagreb sells figs.\nYou: Answer: figs\n\n"
        f"Question: What is sold where {person} lives?"
    )


class LookUp:
    """One episode: searches, then the answer."""

    def __init__(self, table: Table, *, is_char: bool) -> None:
        self._table = table
        self._by_word = {word.lower(): word for word in (*table.where, *table.what)}
        self._is_char = is_char
        self._role = "user" if is_char else "tool"
        self._found: set[str] = set()

    def step(self, action: Action) -> Transition:
        """Replies to a search with the table's entry or an error; any other text is the answer and ends the episode."""
        if action.is_malformed or len(action.calls) > 1:
            status = TurnStatus.MALFORMED if action.is_malformed else TurnStatus.TOOL_ERROR
            return self._say("-=" if self._is_char else "error: one search at a time", status)
        query = self._query(action)
        if query is not None:
            return replace(self._search(query), num_calls=0 if action.calls else 1)
        answer = self._answer(action.text.strip())
        *hops, thing = self._table.chain
        rewards = {OUTCOME: float(answer == thing), "found": len(self._found.intersection(hops)) / len(hops)}
        status = TurnStatus.OK if answer else TurnStatus.MALFORMED
        return Transition(is_end=True, rewards=rewards, status=status, state_key="end")

    def _query(self, action: Action) -> str | None:
        """The query of a search, "" for any other call; None for an answer."""
        text = action.text.strip()
        if self._is_char:
            return text[1:] if text.startswith("?") else None
        if action.calls:
            query = action.calls[0].arguments.get("query")
            return query if action.calls[0].name == TOOL and isinstance(query, str) else ""
        searched = _SEARCH.fullmatch(text) if len(text) < 100 else None
        return searched[1] if searched else None

    def _answer(self, text: str) -> str | None:
        if self._is_char:
            return text
        found = _ANSWER.fullmatch(text) if len(text) < 100 else None
        return found[1].lower() if found else None

    def _search(self, query: str) -> Transition:
        table = self._table
        word = self._by_word.get(query if self._is_char else query.strip().lower()) if len(query) < 100 else None
        if word is None:
            return self._say("-=" if self._is_char else "Nothing is known of that.", TurnStatus.TOOL_ERROR)
        if word in table.where:
            place = table.where[word]
            said = f">{place}=" if self._is_char else f"{word} lives in {place}."
        else:
            said = f"*{table.what[word]}=" if self._is_char else f"{word} sells {table.what[word]}."
        is_new_hop = word in table.chain[:2] and word not in self._found
        self._found.add(word)
        return self._say(said, TurnStatus.OK, 0.5 if is_new_hop else 0.0)

    def _say(self, text: str, status: TurnStatus, reward: float = 0.0) -> Transition:
        message = Message(role=self._role, content=text)
        return Transition(messages=(message,), reward=reward, status=status, state_key=" ".join(sorted(self._found)))
