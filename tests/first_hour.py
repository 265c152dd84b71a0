"""Types every command of docs/tutorial.md, in a folder of its own, and looks at what they say.

    python tests/first_hour.py            # 2 to 4 minutes on 2 cores; .ci/run does it

The page says all: blocks with a title are files, `sh` blocks are commands, a `text` block shows lines that the commands
before it must have said, numbers aside. A word behind `sh` tells what a reader does: `setup` was done before, `ctrl-c
"words"` when these were printed, `background "words"` is another terminal and goes on when they were, `until "pattern"`
is done again until it is there, of `fails` the last command ends with exit code 1, and those of `same` say the same.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "tutorial.md"
_BLOCK: Final = re.compile(r"^```(\w+)(?: ([^\n]*))?\n(.*?)^```$", re.M | re.S)
_WORDS: Final = re.compile(r'^(\S+)(?: "(.*)")?$')
HANG_S: Final = 900.0  # of whatever is waited for


class Typist:
    """Somebody with the page, a shell and several terminals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[Terminal] = []
        self._said = ""  # by the newest commands

    def follow(self, page: str) -> None:
        """Does what the page says. Raises AssertionError where something else comes out."""
        for kind, info, text in _BLOCK.findall(page):
            if info.startswith("title="):
                (self._folder / info.removeprefix("title=").strip('"')).write_text(text)
            elif kind == "sh":
                self._type(info, text)
            elif kind == "text":
                self._compare(text)

    def end(self) -> None:
        """Ctrl-C in every terminal."""
        for terminal in reversed(self._running):
            terminal.interrupt()
            terminal.wait()

    def _type(self, info: str, text: str) -> None:
        found = _WORDS.match(info)
        what, words = (found.group(1), found.group(2) or "") if found else ("", "")
        commands = text.strip()
        if what == "setup":
            return
        print(f"$ {commands}", flush=True)
        if what == "until":
            ends_s = time.monotonic() + HANG_S
            while not re.search(words, said := self._run(commands)):
                assert time.monotonic() < ends_s, f"never seen: {words}\n{said}"
            self._said = said
            return
        if what in ("background", "ctrl-c"):
            terminal = Terminal(commands, self._folder)
            self._running.append(terminal)
            terminal.wait_for(words)
            if what == "ctrl-c":
                terminal.interrupt()
                code = terminal.wait()
                assert code in (0, 130), f"exit code {code} after Ctrl-C\n{terminal.said}"
                self._running.remove(terminal)
            self._said = terminal.said
            return
        self._said = self._run(commands, fails=what == "fails")
        print(self._said, flush=True)
        if what == "same":
            lines = [line for line in self._said.splitlines() if line.strip() and "Loading weights" not in line]
            half = len(lines) // 2
            assert half and lines[:half] == lines[half:], f"these differ: {lines}"

    def _run(self, commands: str, fails: bool = False) -> str:
        *before, last = commands.splitlines()
        said = ""
        for command in (*before, last):
            done = Terminal(command, self._folder)
            code = done.wait()
            said += done.said
            if not fails:
                assert code == 0, f"{command}: exit code {code}\n{done.said}"
            elif command == last:
                assert code == 1, f"{command}: exit code {code}, expected 1\n{done.said}"
            assert "Traceback" not in done.said, done.said
        return said

    def _compare(self, text: str) -> None:
        """Every line that the page shows has one like it in what was said, numbers aside."""
        said = {_shape(line) for line in self._said.splitlines()}
        for line in text.strip().splitlines():
            parts = [re.escape(part) for part in _shape(line).split("...")]
            seen = any(re.search(".*".join(parts), each) for each in said)
            assert seen, f"the page shows:\n{line}\nnot in:\n{self._said}"


class Terminal:
    """One command and what it prints."""

    def __init__(self, command: str, folder: Path) -> None:
        bin = str(Path(sys.executable).parent)
        environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            ["bash", "-c", command if command.startswith("for ") else f"exec {command}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.said = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, words: str) -> None:
        """Until these were printed."""
        with self._news:
            seen = self._news.wait_for(lambda: words in self.said or self._process.poll() is not None, HANG_S)
        assert seen and words in self.said, f"never printed: {words}\n{self.said}"

    def wait(self) -> int:
        """Until it has ended; its exit code."""
        code = self._process.wait(HANG_S)
        self._reader.join(HANG_S)
        return code

    def interrupt(self) -> None:
        """Ctrl-C: to the command and what it started, as a terminal does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.said += line
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


def _shape(line: str) -> str:
    """A line without what differs from run to run: numbers, ids, how much space is between words."""
    return " ".join(re.sub(r"[0-9a-f]{8,}|[-+]?\.?\d[\d.,e/-]*|(?<= )\.\d+", "#", line).split())


def main() -> None:
    """Follows the page in a new folder."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        typist = Typist(Path(folder))
        try:
            typist.follow(PAGE.read_text(encoding="utf-8"))
        finally:
            typist.end()
    print(f"every command of {PAGE.name} did what the page says: {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
