"""Tasksets of the verifiers library (its API `verifiers.v1`) as environments whose episodes every node can replay.

Invariant: an episode depends only on the configuration of its taskset, the number of the task and the actions: tools
are called in this process, and rewards judge the finished conversation. A taskset that declares something else (a
container, a model as judge, an environment or harness of its own, a stop condition, ...) is refused by name.

Source: https://github.com/PrimeIntellect-ai/verifiers, version 0.4; imported when such an environment is built.
"""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.params import MAX_TURNS, verifier_name
from swarm.episode import OUTCOME, Action, Message, ToolCall, Transition, TurnStatus
from swarm.errors import ConfigError
from swarm.interfaces import Episode
from swarm.plugins import code_version

# Hooks of a task that need a machine of its own, which it does not have here.
_RUNTIME_HOOKS: Final = ("setup", "finalize", "stage_verifier", "runtime_env")


class TasksetEnvironment(NumberedEnvironment):
    """Tasks of a taskset: a question, calls of tools if it has any, and a turn without a call, which ends the episode.

    Params: `taskset` (an installed taskset package), `max_turns` (1 without tools, else 8); all others are the
    taskset's own configuration. Rewards: each by its name, and outcome, their weighted sum as verifiers computes it.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError if verifiers is missing, or the taskset cannot be loaded or replayed, or has no tasks."""
        settings = dict(config.params)
        taskset_id, max_turns = settings.pop("taskset", ""), settings.pop("max_turns", None)
        origin = f"environment {config.name}: taskset {taskset_id!r}"
        try:
            import verifiers.v1 as library
            from verifiers.v1.utils.loaders import taskset_config_type
        except ImportError as error:
            raise ConfigError(f"{origin} needs the library: pip install verifiers==0.4.0 ({error})") from None
        self._library: Any = library
        try:
            taskset = library.load_taskset(taskset_config_type(taskset_id)(id=taskset_id, **settings))
            self._tasks: list[Any] = list(islice(taskset, config.num_tasks))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ConfigError(f"{origin} cannot be loaded: its configuration: {wrong}") from error
        except Exception as error:
            raise ConfigError(f"{origin} cannot be loaded: {type(error).__name__}: {error}") from error
        if not self._tasks:
            raise ConfigError(f"{origin} has no tasks")
        self._shared_toolsets = lambda: type(taskset).toolsets(taskset.config)
        _check(origin, taskset_id, self._tasks, [*self._shared_toolsets(), *self._toolsets_of(self._tasks[0])])
        tools = self._new_tools(self._tasks[0])
        self._guide = tools.guide()
        self.max_turns = max_turns if max_turns is not None else 8 if self._guide else 1
        if not isinstance(self.max_turns, int) or not 1 <= self.max_turns <= MAX_TURNS:
            raise ConfigError(f"{origin}: params.max_turns must be from 1 to {MAX_TURNS}, got {self.max_turns!r}")
        self.signals = frozenset({"reward_parts", *(("tool_calls",) if self._guide else ())})
        # The tasks may differ between nodes, as with the newest revision of a dataset.
        tasks = hashlib.sha256("".join(task.hash for task in self._tasks).encode()).hexdigest()[:8]
        code = f"{code_version(type(taskset))} {code_version(type(self._tasks[0]))}"
        super().__init__(config, f"{verifier_name(config, 1)} {tasks} {code}", len(self._tasks))

    def build(self, task_id: int) -> Problem:
        """Problem with the text of a task's prompt, and its answer if it has one."""
        data = self._tasks[task_id].data
        answer = getattr(data, "answer", None)
        return Problem(
            question=data.prompt_text,
            reference="" if answer is None else str(answer),
            entry=task_id,
            initial_state=f"{data.system_prompt or ''}\n{data.prompt_text}",
        )

    def opening(self, problem: Problem) -> tuple[Message, ...]:
        """The chat before the first action: system prompt and description of the tools, then the task's messages."""
        data = self._tasks[problem.entry].data
        system = "\n\n".join(text for text in (data.system_prompt, self._guide) if text)
        before = (Message(role="system", content=system),) if system else ()
        if data.prompt is None or isinstance(data.prompt, str):
            return *before, *super().opening(problem)
        return *before, *(Message(role=each.role, content=_text(each.content)) for each in data.prompt)

    def begin(self, problem: Problem) -> Episode:
        """Starts an episode with new tools."""
        task = self._tasks[problem.entry]
        return _Try(self._library, task, self._new_tools(task), self.opening(problem))

    def _new_tools(self, task: Any) -> "_Tools":
        return _Tools(task, [*self._shared_toolsets(), *self._toolsets_of(task)])

    @staticmethod
    def _toolsets_of(task: Any) -> list[Any]:
        return type(task).toolsets(task.config)


class _Tools:
    """Tools of one episode, with their state."""

    def __init__(self, task: Any, toolsets: list[Any]) -> None:
        self._by_name: dict[str, Callable[..., Any]] = {}
        self.state: Any = None
        for toolset in toolsets:
            _finished(toolset.setup())
            _finished(toolset.setup_task(task.data))
            self.state = toolset.state if type(toolset.state).model_fields.keys() - {"artifacts"} else self.state
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for name, tool in inspect.getmembers(toolset, lambda member: getattr(member, "tool", False) is True):
                self._by_name[prefix + (getattr(tool, "tool_name", None) or name)] = tool

    def guide(self) -> str:
        """Instructions for the model to call the tools; "" if there are none."""
        lines = [
            f"{name}{inspect.signature(tool)}: {inspect.cleandoc(tool.__doc__ or '')}"
            for name, tool in self._by_name.items()
        ]
        if not lines:
            return ""
        form = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        return "\n".join(["You may call these tools:", *lines, f"Call one with {form}; answer without a call to end."])

    def call(self, call: ToolCall) -> str:
        """Reply of a tool as text. Raises LookupError for an unknown tool, and any error of a tool or its arguments."""
        if call.name not in self._by_name:
            raise LookupError(f"no tool {call.name!r}; there are: {', '.join(self._by_name)}")
        tool = self._by_name[call.name]
        inspect.signature(tool).bind(**call.arguments)
        said = tool(**call.arguments)
        said = _finished(_awaited(said)) if inspect.isawaitable(said) else said
        return said if isinstance(said, str) else json.dumps(said, default=str)


class _Try:
    """One episode, kept as messages of a verifiers trace."""

    def __init__(self, library: Any, task: Any, tools: _Tools, opening: tuple[Message, ...]) -> None:
        self._library, self._task, self._tools = library, task, tools
        kinds = {"system": library.SystemMessage, "user": library.UserMessage, "assistant": library.AssistantMessage}
        self._messages: list[Any] = [kinds[message.role](content=message.content) for message in opening]
        self._sampled: set[int] = set()

    def step(self, action: Action) -> Transition:
        """Replies with the results of the called tools, or an error; an action without a call ends the episode."""
        library = self._library
        turn = len(self._sampled)
        calls = [
            library.ToolCall(id=f"{turn}.{index}", name=call.name, arguments=json.dumps(dict(call.arguments)))
            for index, call in enumerate(action.calls)
        ]
        self._sampled.add(len(self._messages))
        self._messages.append(library.AssistantMessage(content=action.text, tool_calls=calls or None))
        if action.is_malformed:
            return self._say([("that tool call cannot be read", "")], TurnStatus.MALFORMED)
        if action.calls:
            said: list[tuple[str, str]] = []
            status = TurnStatus.OK
            for made, call in zip(calls, action.calls, strict=True):
                try:
                    said.append((self._tools.call(call), made.id))
                except Exception as error:  # the model reads the error
                    said.append((f"error: {error}", made.id))
                    status = TurnStatus.TOOL_ERROR
            return self._say(said, status)
        rewards = self._rewards()
        return Transition(is_end=True, rewards=rewards, state_key="end")

    def _say(self, texts: list[tuple[str, str]], status: TurnStatus) -> Transition:
        for text, call_id in texts:
            kind = self._library.ToolMessage if call_id else self._library.UserMessage
            named = {"tool_call_id": call_id} if call_id else {}
            self._messages.append(kind(content=text, **named))
        messages = tuple(Message(role="tool" if call_id else "user", content=text) for text, call_id in texts)
        return Transition(messages=messages, status=status)

    def _rewards(self) -> Mapping[str, float]:
        library, task = self._library, self._task
        trace = library.Trace(
            task=library.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=library.AgentInfo(config=library.AgentConfig()),
            nodes=[
                library.MessageNode(parent=index - 1 if index else None, message=each, sampled=index in self._sampled)
                for index, each in enumerate(self._messages)
            ],
            is_completed=True,
            ok=True,
        )
        if self._tools.state is not None:
            trace.state = self._tools.state
        _finished(task.score(trace))
        named = {name: float(each.score) for name, each in trace.rewards.items() if each is not None}
        return {**named, OUTCOME: float(trace.reward)}


def _check(origin: str, taskset_id: str, tasks: Sequence[Any], toolsets: Sequence[Any]) -> None:
    """Raises ConfigError for tasks, all of one type, that declare an unsupported feature or have no reward."""
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.task import Task
    from verifiers.v1.utils.loaders import default_harness_id, environment_class

    task, needs = tasks[0], list[str]()
    if (played_by := environment_class(taskset_id)) is not SingleAgentEnv:
        needs.append(f"its own environment {played_by.__name__}")
    if default_harness_id(taskset_id) == taskset_id:
        needs.append("its own harness")
    needs += [f"the stop condition {hook.__name__}" for hook in task.hooks("stop")]
    needs += [name for name in ("skills", "artifacts") if any(getattr(each.data, name) for each in tasks)]
    if not all(map(_is_text, tasks)):
        needs.append("a prompt with more than texts, such as images or calls of tools")
    needs += [f"tools of {type(each).__name__} elsewhere" for each in toolsets if _is_elsewhere(each)]
    if task.NEEDS_CONTAINER or any(each.data.image for each in tasks):
        needs.append("a container")
    if not all(each.data.prompt for each in tasks):
        needs.append("a user who opens the conversation, for a task has no prompt")
    needs += [f"the hook {name}" for name in _RUNTIME_HOOKS if getattr(type(task), name) is not getattr(Task, name)]
    if task.plugged_judges():
        needs.append("a model as judge")
    hooks: list[Callable[..., Any]] = task.hooks("reward")
    for hook in hooks:
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            needs.append(f"a runtime for the reward {hook.__name__}")
    if not hooks:
        needs.append("a reward, for it has none")
    if needs:
        raise ConfigError(f"{origin} needs {', '.join(needs)}: it cannot be replayed here; play it in verifiers itself")


def _is_text(task: Any) -> bool:
    """True if the prompt of a task is a text, or text messages of the system, the user and the model."""
    if task.data.prompt is None or isinstance(task.data.prompt, str):
        return True
    return all(
        each.role != "tool"
        and not getattr(each, "tool_calls", None)
        and (isinstance(each.content, str) or all(part.type == "text" for part in each.content or ()))
        for each in task.data.prompt
    )


def _is_elsewhere(toolset: Any) -> bool:
    """True if a toolset is served outside this process, or overrides how its tools are registered."""
    from verifiers.v1.mcp import Toolset
    from verifiers.v1.runtimes import SubprocessConfig

    config = toolset.config
    runtime = getattr(config, "runtime", None)
    has_own_machine = runtime is not None and not isinstance(runtime, SubprocessConfig)
    is_far = bool(getattr(config, "url", None)) or getattr(config, "colocated", False) or has_own_machine
    return is_far or type(toolset).register is not Toolset.register


def _text(content: Any) -> str:
    parts = [content] if isinstance(content, str) else [part.text for part in content or () if part.type == "text"]
    return "\n".join(parts)


class _NoOutside(asyncio.BaseEventLoop):
    """An event loop without sockets, which the confined process may not open: waiting for an event or timer fails."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self  # the loop asks it for events

    def select(self, timeout: float | None) -> list[Any]:
        """Returns no events. Raises RuntimeError if the loop would have to wait."""
        if timeout != 0:
            raise RuntimeError("a tool or a reward waits for something outside: that cannot be replayed")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """Does nothing: `select` returns no events."""


def _finished(work: Coroutine[Any, Any, object]) -> object:
    """Runs a coroutine to its end and returns its result. Raises its errors, and RuntimeError if it has to wait."""
    loop = _NoOutside()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def _awaited(value: Awaitable[object]) -> object:
    return await value
