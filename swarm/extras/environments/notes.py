"""Notes on a text that is read in parts: each part is a conversation that begins with the notes on the parts before.

Invariant: a fact that the notes do not hold is lost; the question comes only after the last part.
"""

import random
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import Params, verifier_name
from swarm.episode import OUTCOME, Action, Actions, Message, Transition, TurnStatus

Facts = tuple[tuple[str, str], ...]  # who, and where; or letter and digit
_PEOPLE: Final = (
    "Abel Bruno Cora Dora Emil Fritz Gerda Hugo Ida Jonas Karl Lena Max Nora Otto Paul Rosa Sven Tina Ulf Vera Willi"
)
_PLACES: Final = (
    "Athens Berlin Cairo Dublin Essen Florence Geneva Hanoi Istanbul Jena Kyiv Lima Madrid Nairobi Oslo Paris Quito "
    "Riga Seoul Tunis Utrecht Vienna Warsaw Xian York Zagreb"
)


class NotesEnvironment(NumberedEnvironment):
    """Reading a text part by part with notes, and answering a question from the notes alone.

    Params: `parts` (3), `facts` (2: of each part), `note` (24 for each fact, in char style 2: most characters of the
    notes; longer notes are cut off), `style` (text, or char), `max_turns` (parts + 1). Actions: the notes on all parts
    so far, after the last part the answer. Rewards: outcome 1 for the right answer, `kept` the share of all facts that
    the last notes hold. A turn with notes earns the change of that share.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Reads the parameters. Raises ConfigError for an unknown one, or a value out of its bounds."""
        params = Params(config)
        self.style = params.choice("style", "text", ("text", "char"))
        self.parts = params.integer("parts", 3, 1, 8)
        self.facts = params.integer("facts", 2, 1, 2)
        num_facts = self.parts * self.facts
        self.note = params.integer("note", (2 if self.style == "char" else 24) * num_facts, 1, 2_000)
        self.max_turns = params.turns(self.parts + 1)
        self.signals = frozenset({"turn_rewards", "reward_parts"})
        params.finish()
        super().__init__(config, verifier_name(config, 1))

    def build(self, task_id: int) -> Problem:
        """Draws facts about different people, and the person that the question is about."""
        source = random.Random(f"{self.config.seed}:{task_id}")
        count, is_char = self.parts * self.facts, self.style == "char"
        who = source.sample("abcdefghijklmnopqrstuvwxyz" if is_char else _PEOPLE.split(), count)
        facts = tuple((name, source.choice("0123456789" if is_char else _PLACES.split())) for name in who)
        asked = source.randrange(count)
        return Problem(
            question=self.part(facts, 0, ""),
            reference=facts[asked][1],
            entry=(facts, asked),
            initial_state=f"{facts} {asked}",
        )

    def begin(self, problem: Problem) -> "Reading":
        """A new try, after the first part of the text."""
        return Reading(self, *problem.entry)

    def demonstration(self, task_id: int) -> Actions:
        """Notes of all facts after each part, and the answer. Raises LookupError for a task out of range."""
        problem = self.problem(task_id)
        facts, _ = problem.entry
        joint = "" if self.style == "char" else ", "
        notes = [joint.join(self.noted(fact) for fact in facts[: self.facts * (k + 1)]) for k in range(self.parts)]
        return (*notes, problem.reference)

    def part(self, facts: Facts, number: int, notes: str) -> str:
        """Message with the notes so far and part `number` (from 0) of the text."""
        own = facts[number * self.facts : (number + 1) * self.facts]
        if self.style == "char":
            return f"n:{notes}:{''.join(self.noted(fact) for fact in own)}="
        told = " ".join(f"{who} lives in {where}." for who, where in own)
        return (
            f"You read a text of {self.parts} parts, and a question comes after the last one. You will not see this "
            f"part again: write down all you know so far in {self.note} characters, such as: Kim Rome, Jo Bern\n\n"
            f"Your notes: {notes or 'none'}\nPart {number + 1}: {told}"
        )

    def question(self, who: str, notes: str) -> str:
        """Message with the last notes and the question."""
        if self.style == "char":
            return f"q:{notes}:{who}="
        return f"Your notes: {notes or 'none'}\nWhere does {who} live? Answer with one word."

    def noted(self, fact: tuple[str, str]) -> str:
        """A fact in the form that notes must contain."""
        return "".join(fact) if self.style == "char" else " ".join(fact)


class Reading:
    """One try: notes on each part, then the answer."""

    def __init__(self, environment: NotesEnvironment, facts: Facts, asked: int) -> None:
        self._environment = environment
        self._facts = facts
        self._asked = asked
        self._num_read = 1  # parts
        self._kept = 0.0

    def step(self, action: Action) -> Transition:
        """Takes notes and returns the next part or the question; takes the answer and ends the episode."""
        environment = self._environment
        if self._num_read > environment.parts:
            _, where = self._facts[self._asked]
            is_right = action.text.strip().rstrip(".").lower() == where.lower() if len(action.text) < 100 else False
            return Transition(is_end=True, rewards={OUTCOME: float(is_right), "kept": self._kept}, state_key="end")
        notes = action.text.strip()[: environment.note]
        before, self._kept = self._kept, self._share(notes)
        if self._num_read < environment.parts:
            text = environment.part(self._facts, self._num_read, notes)
        else:
            text = environment.question(self._facts[self._asked][0], notes)
        self._num_read += 1
        return Transition(
            messages=(Message(role="user", content=text),),
            reward=self._kept - before,
            conversation=self._num_read - 1,
            status=TurnStatus.OK if notes else TurnStatus.MALFORMED,
        )

    def _share(self, notes: str) -> float:
        """Share of all facts that the notes hold."""
        return sum(self._environment.noted(fact) in notes for fact in self._facts) / len(self._facts)
