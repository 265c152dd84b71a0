"""Tokens of conversations of several turns against parts written by hand, for eight chat templates.

SWARM_TURN_EPISODES episodes a template; 1,250 are 10,000 in all, and more than 1,000,000 tokens.
"""

import hashlib
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from swarm.config import EnvironmentConfig, ModelConfig
from swarm.environments.load import build_environment
from swarm.environments.replay import ReplayedEpisode, replay
from swarm.episode import Message
from swarm.model.conversations import Conversations
from swarm.model.source import resolve_source
from swarm.model.tokenizer import RENDERER, HfTokenizer
from swarm.types import Task
from tests.attacks.hostile_actions import hostile_actions

from .conversation_styles import STYLES, TEMPLATES, Control, Parts, Style, write_folder

NUM_EPISODES = int(os.environ.get("SWARM_TURN_EPISODES", "20"))
MAX_TURNS = 6
SECTIONS: tuple[dict[str, Any], ...] = (
    # its other form has a call and a result of a tool in the prompt, which the styles' prompts do not write
    {"kind": "calculator", "params": {"call": "line"}},
    {"kind": "retry", "params": {"inner": {"kind": "char", "dataset": "reverse"}}},
    {"kind": "look_up"},
    {"kind": "grid_world"},
    {"kind": "apps"},
    {"kind": "dialogue"},
    {"kind": "nim"},
    {"kind": "notes"},
)
ENVIRONMENTS: list[Any] = [build_environment(EnvironmentConfig(name=each["kind"], **each)) for each in SECTIONS]
WITHOUT_SYSTEM = ("gemma",)
TOOLS = {"calculator": ("expression",), "search": ("query",), "book": ("day", "time")}
HOSTILE = [
    text
    for text in hostile_actions(TOOLS, "What?", "42", ["7"], seed=0, count=100)
    if len(text) < 2000 and text.encode(errors="ignore").decode() == text  # a model draws whole characters
]
WORDS = (
    "the",
    "17 + 25",
    "=",
    "42",
    "no, again",
    "\u00e9t\u00e9",
    "\u4e2d\u6587",
    "\U0001f600",
    "{}",
    "a\nb",
    "\ue000",
    "\U000f0000",
)
ENDS = ("", " ", "\n", "\t", "\n\n", "  \n ", "\u00a0")


# RENDERER, and hashes of what each style writes: they change together, so that nodes of equal digests agree.
PINNED = (
    1,
    {
        "chatml": "5e02ef289a4964f7",
        "llama3": "2078e032856f6d26",
        "qwen3": "bcce3d38bca8911c",
        "mistral": "a6689e6932cc0697",
        "gemma": "6cb4b959868b1020",
        "deepseek": "9c34fea139dfcff5",
        "phi": "6e7b57324a8dbc4e",
        "tools_last": "f478c7041963dd3d",
    },
)


@pytest.fixture(scope="module", params=STYLES, ids=lambda style: style.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Case":
    folder = tmp_path_factory.mktemp(request.param.name)
    write_folder(request.param, resolve_source(ModelConfig(source="smollm2"), None, with_weights=False), folder)
    return Case(request.param, folder)


class Case:
    """A style with its tokenizer at two nodes, of which the consumer never sees a prompt or a row."""

    def __init__(self, style: Style, folder: Path) -> None:
        self.style = style
        self.tokenizer, self.consumer = HfTokenizer(folder), HfTokenizer(folder)
        self.reader = Reader(folder)


class DrawnConversation:
    """Random conversations of a style, the marker texts of all styles in them."""

    def __init__(self, style: Style, seed: int) -> None:
        self.random = random.Random(f"{style.name} {seed}")
        self.style = style
        self.markers = sorted({marker for each in STYLES for marker in (*each.special, *each.plain_added, *each.ends)})

    def text(self) -> str:
        draw = self.random
        if draw.random() < 0.1:
            return draw.choice(ENDS)
        words = [
            draw.choice(WORDS) if draw.random() < 0.75 else draw.choice(self.markers)
            for _ in range(draw.randint(1, 12))
        ]
        joined = "".join(word + draw.choice(("", " ", "\n")) for word in words)
        return draw.choice(ENDS) + joined + draw.choice(ENDS)

    def prompt(self) -> list[Message]:
        draw, messages = self.random, list[Message]()
        if self.style.name != "gemma" and draw.random() < 0.5:
            messages.append(Message(role="system", content=self.text()))
        if draw.random() < 0.2:
            messages += [Message(role="user", content=self.text()), Message(role="assistant", content="It is 4.")]
        return [*messages, Message(role="user", content=self.text())]

    def observation(self) -> list[Message]:
        draw = self.random
        roles = draw.choices(("user", "tool", "system"), (6, 6, 1), k=draw.choice((1, 1, 1, 2, 3)))
        messages = [Message(role=role, content=self.text()) for role in roles]
        return [*messages, Message(role="assistant", content=self.text())] if draw.random() < 0.1 else messages


class Reader:
    """Ids back to parts, by the tokenizer file alone."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.controls = {index: Control(token.content) for index, token in added.items()}
        self.ids = {control.name: index for index, control in self.controls.items()}

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def parts(self, ids: Sequence[int]) -> Parts:
        found: Parts = [""]
        run: list[int] = []
        for index in [*ids, -1]:
            if index >= 0 and index not in self.controls:
                run.append(index)
                continue
            found[-1] = self._tokenizer.decode(run, skip_special_tokens=False) if run else ""
            run = []
            found += [self.controls[index], ""] if index >= 0 else []
        return found


def merged(parts: Parts) -> Parts:
    """Text and control tokens in turn, text first and last."""
    found: Parts = [""]
    for part in parts:
        if isinstance(part, Control):
            found += [part, ""]
        else:
            last = found[-1]
            assert isinstance(last, str)
            found[-1] = last + part
    return found


def action(found: DrawnConversation, tokenizer: HfTokenizer, reader: Reader) -> tuple[list[int], Parts, bool]:
    """A turn as drawn: its tokens, not as an encoder would cut them; what they are; whether its end was drawn."""
    draw, style = found.random, found.style
    ids, written = list[int](), Parts()
    for _ in range(draw.randint(0, 3)):
        text = found.text()
        if draw.random() < 0.1:
            marker = draw.choice([*style.special, *style.plain_added, "<|im_start|>"])
            if marker not in style.ends:
                ids.append(reader.ids[marker])
                written.append(Control(marker))
        elif draw.random() < 0.5:
            ids += tokenizer.encode_response(text)[:-1]
            written += style.own(text)
        else:
            ids += [index for char in text for index in tokenizer.encode_response(char)[:-1]]
            written.append(text)
    is_ended = draw.random() < 0.7
    if is_ended:
        end = draw.choice(style.ends)
        ids.append(reader.ids[end])
        written.append(Control(end))
    return ids, written, is_ended


def played_action(draw: random.Random, right: Sequence[str]) -> str:
    """An action for an environment: a right one of this task, a wrong one, or a hostile one that fits a turn."""
    kind = draw.random()
    if kind < 0.6:
        return draw.choice(right)
    return draw.choice(HOSTILE) if kind < 0.8 else draw.choice(("7", "search Bob", "up", "when?", ""))


@pytest.mark.timeout(3600)
def test_no_token_of_a_conversation_differs_from_what_is_written_by_hand(case: Case) -> None:
    style, tokenizer, consumer, reader = case.style, case.tokenizer, case.consumer, case.reader
    num_tokens = num_observations = 0
    for seed in range(NUM_EPISODES):
        found = DrawnConversation(style, seed)
        prompt = found.prompt()
        row = tokenizer.encode_prompt(Task(env="e", task_id=seed, messages=tuple(prompt)))
        written = style.prompt(prompt)
        assert reader.parts(row) == merged(written), f"prompt of {style.name}, seed {seed}"
        for turn in range(found.random.randint(1, MAX_TURNS)):
            ids, acted, is_ended = action(found, tokenizer, reader)
            messages = found.observation()
            observed = tokenizer.encode_observation(messages, is_ended)
            assert observed == consumer.encode_observation(messages, is_ended)
            assert reader.parts(observed) == merged(style.observation(messages, is_ended)), (seed, turn)
            row += ids + observed
            written += acted + style.observation(messages, is_ended)
            num_observations += 1
        assert reader.parts(row) == merged(written), f"{style.name}, seed {seed}"
        num_tokens += len(row)
    print(f"{style.name}: {NUM_EPISODES} episodes, {num_observations} observations, {num_tokens} tokens")


@pytest.mark.timeout(3600)
def test_a_consumer_rebuilds_every_token_that_environments_add(case: Case) -> None:
    style, tokenizer, consumer, reader = case.style, case.tokenizer, case.consumer, case.reader
    num_tokens = num_observations = 0
    for seed in range(NUM_EPISODES):
        draw = random.Random(seed)
        environment = ENVIRONMENTS[seed % len(ENVIRONMENTS)]
        if style.name in WITHOUT_SYSTEM and environment.task(seed).messages[0].role == "system":
            continue  # its template refuses such a prompt, as it does for single answers
        task, episode = environment.task(seed), ReplayedEpisode(environment, seed)
        right = environment.demonstration(seed)
        row = tokenizer.encode_prompt(task)
        written = style.prompt(task.messages)
        turns: list[tuple[list[int], bool]] = []  # of each action, and whether its end was drawn
        observations: list[list[int]] = []
        here, ended = 0, dict[int, bool]()  # conversation of the action; of each, whether its newest end was drawn
        while not episode.is_ended:
            ids = tokenizer.encode_response(played_action(draw, right))[:-1]
            is_ended = draw.random() < 0.9
            ids += [reader.ids[style.ends[0]]] * is_ended
            text = tokenizer.decode(ids)
            transition = episode.step(text)
            ended[here], here = is_ended, transition.conversation
            written += [*style.own(text), *[Control(style.ends[0])] * is_ended]
            row += ids
            turns.append((ids, is_ended))
            if not episode.is_ended and here in ended:
                observations.append(tokenizer.encode_observation(transition.messages, ended[here]))
                written += style.observation(transition.messages, ended[here])
            elif not episode.is_ended:
                observations.append(tokenizer.encode_prompt(replace(task, messages=transition.messages)))
                written += style.prompt(transition.messages)
            row += [] if episode.is_ended else observations[-1]
        assert reader.parts(row) == merged(written), f"{environment.verifier}, seed {seed}"
        outcome = replay(environment, seed, tuple(consumer.decode(ids) for ids, _ in turns))
        conversations = Conversations(consumer, task.env)
        rebuilt = [
            conversations.observe(transition, is_ended).token_ids
            for transition, (_, is_ended) in zip(outcome.transitions, turns, strict=True)
            if not transition.is_end
        ]
        assert rebuilt == observations
        num_observations += len(observations)
        num_tokens += len(row)
    print(f"{style.name}: {NUM_EPISODES} played episodes, {num_observations} observations, {num_tokens} tokens")


def test_a_prompt_that_spells_no_control_token_is_the_rendered_text_encoded(case: Case) -> None:
    found = DrawnConversation(case.style, seed=0)
    found.markers = ["<b>", "<|", "|>", "[/"]
    for _ in range(20):
        messages = found.prompt()
        ids = case.tokenizer.encode_prompt(Task(env="e", task_id=0, messages=tuple(messages)))
        rendered, _ = render_jinja_template(
            [[{"role": m.role, "content": m.content} for m in messages]],
            chat_template=(TEMPLATES / f"{case.style.name}.jinja").read_text(),
            add_generation_prompt=True,
            bos_token=case.style.bos,
            eos_token=case.style.ends[-1],
        )
        text = re.sub("Today Date: .* 20.*", "Today Date: 26 Jul 2024", rendered[0])
        assert ids == case.reader.encode(text)


def test_what_is_rendered_changes_only_with_its_version(case: Case) -> None:
    """Raise RENDERER with whatever turns this red, then pin anew; the sampled conversations may change without it."""
    rendered: list[list[int]] = []
    for role in ("user", "tool", "system"):
        for content in ("a", " <|im_end|>\n", "", "</think>7", "\ud800"):
            said = Message(role=role, content=content)
            rendered += [case.tokenizer.encode_observation(messages, True) for messages in ([said], [said, said])]
    prompt = Message(role="user", content=" <|im_end|> 17 + 25?\n")
    rendered.append(case.tokenizer.encode_prompt(Task(env="e", task_id=0, messages=(prompt,))))
    found = hashlib.sha256(repr(rendered).encode()).hexdigest()[:16]
    assert (RENDERER, found) == (PINNED[0], PINNED[1].get(case.style.name))
