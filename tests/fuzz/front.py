"""The attacked front end: a process running `trueroll http`, with small limits and its own log."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from fuzz.violation import Violation

LIMITS = ("--max-body-bytes", "131072", "--max-open-requests", "64", "--drain-seconds", "5")
LIMITS += ("--sglang", "--vllm", "--tinker")
COMMAND = (sys.executable, "-P", "-c", "from trueroll.rollout.tools.program import main; main()")
END_SECONDS = 60.0


class FrontProcess:
    """Serves the worker at `address` with the tokenizer of `model`. Logs to `log`. Listens on `host` and `port`."""

    def __init__(self, address: str, model: str, log: Path, command: tuple[str, ...] = COMMAND) -> None:
        self.log = log
        arguments = ("http", address, "--port", "0", "--tokenizer", model, *LIMITS)
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                (*command, *arguments), stdout=subprocess.PIPE, stderr=stderr, cwd=log.parent
            )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        found = re.match(r"ready url=http://([\d.]+):(\d+) ", line)
        if found is None:
            self.kill()
            raise Violation(f"the front end was not ready; it printed {line!r}")
        self.address = found[1], int(found[2])

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def check_health(self, patience: float) -> None:
        """Check that the front end answers and reports the worker as ready."""
        if b'"state":"ready"' not in (answer := self._get("/health", patience)):
            raise Violation(f"the front end reports a ready worker as {answer!r:.300}")

    def check_idle(self, patience: float) -> None:
        """Check that the front end reports no open request."""
        deadline = time.monotonic() + patience
        while b"trueroll_http_open_requests 0.0" not in (page := self._get("/metrics", patience)):
            if time.monotonic() > deadline:
                lines = [line for line in page.decode(errors="replace").split("\n") if "open_requests" in line]
                raise Violation(f"the idle front end counts open requests: {lines}")
            time.sleep(0.05)

    def _get(self, path: str, patience: float) -> bytes:
        connection = http.client.HTTPConnection(*self.address, timeout=patience)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise Violation(f"the front end did not answer {path}: {error!r}") from None
        finally:
            connection.close()

    def end(self) -> None:
        """Send SIGTERM. Raise Violation if the front end does not exit, exits with an error, or has logged an
        unexpected exception.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Violation(f"the front end did not end within {END_SECONDS} s after SIGTERM") from None
        if code != 0:
            raise Violation(f"the front end exited with code {code} after SIGTERM")
        if "Traceback" in (text := self.log.read_text(errors="replace")):
            at = text.index("Traceback")
            raise Violation(f"the front end logged an unexpected exception: {text[at : at + 3000]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_words(self) -> list[str]:
        """Return the last lines of the front end's log."""
        return self.log.read_text(errors="replace").splitlines()[-12:]
