"""A headless Chromium for tests, spoken to by its DevTools protocol over two pipes: no port, no other package.

The protocol: https://chromedevtools.github.io/devtools-protocol/ ; with ``--remote-debugging-pipe`` the browser reads
commands from descriptor 3 and writes answers and events to 4, as JSON with a NUL behind each.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
HOW_TO_GET_IT = (
    "no Chromium on the PATH: install one (Debian: apt-get install chromium; `make` does it where it is root)"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
FREE = 10
"""Descriptors of our own begin here, so that none is 3 or 4."""


def find_browser():
    """The path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class BrowserError(RuntimeError):
    """The browser refused a command, or said nothing in time."""


class Browser:
    """One browser with one page, which remembers what it asked the network for and what it complained of.

    Args:
        path: of the program.
        timeout_s: the longest that an answer may take.
    """

    def __init__(self, path, timeout_s=60.0):
        self.timeout_s = timeout_s
        self.events = []
        self._next, self._rest, self._session = 0, b"", None
        self._folder = tempfile.mkdtemp(prefix="browser-")
        self._pid, self._to, self._from = _start(path, self._folder)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method, **params):
        """A command's result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda found: found.get("id") == message["id"], method)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path, *, width=1280, height=900, dark=False):
        """Load a file at a size in CSS pixels, in light or dark."""
        self.resize(width, height, dark=dark)
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self._wait(lambda found: found.get("method") == "Page.loadEventFired", "the page's load")

    def resize(self, width, height=900, *, dark=False):
        """Another size and scheme for the page that is open."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, expression):
        """The value of an expression in the page, as JSON can say it."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def requests(self):
        """Addresses that the page asked for since it was opened, but for its own file."""
        sent = (e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [url for url in sent if not url.startswith("file:")]

    def complaints(self):
        """Errors of the console, of scripts and of the page's policy since it was opened."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        console = [
            e for e in self.events if e["method"] == "Runtime.consoleAPICalled" and e["params"]["type"] == "error"
        ]
        return [str(e["params"]) for e in self.events if e["method"] in kinds] + [str(e["params"]) for e in console]

    def dialogs(self):
        """Messages of dialogs that scripts opened."""
        return [e["params"]["message"] for e in self.events if e["method"] == "Page.javascriptDialogOpening"]

    def screenshot(self, path, *, whole=True):
        """A picture of the page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        """End the browser, and remove what it left."""
        self._session = None
        with contextlib.suppress(OSError):  # it may have ended already
            os.write(self._to, b'{"id":0,"method":"Browser.close"}\0')
        if not _ended(self._pid, 10.0):
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, wanted, what):
        """The first message that is wanted; events are kept, also that one."""
        until = time.monotonic() + self.timeout_s
        while True:
            found = self._read(until, what)
            if "method" in found:
                self.events.append(found)
            if wanted(found):
                return found

    def _read(self, until, what):
        waiting = (
            select.poll()
        )  # select() itself takes no descriptor from 1024 on, and a long test run has as many open
        waiting.register(self._from, select.POLLIN)
        while b"\0" not in self._rest:
            ready = waiting.poll(1000 * max(0.0, until - time.monotonic()))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                log = (Path(self._folder) / "stderr").read_text(errors="replace")[-2000:]
                raise BrowserError(f"no answer to {what} ({'it ended' if ready else 'too late'}): {log}")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _start(path, folder):
    """The browser's process, which leads a group of its own, and our ends of the two pipes."""
    ours_from, theirs_to = map(_high, os.pipe())
    theirs_from, ours_to = map(_high, os.pipe())
    log = os.path.join(folder, "stderr")
    actions = [
        (os.POSIX_SPAWN_DUP2, theirs_from, 3),
        (os.POSIX_SPAWN_DUP2, theirs_to, 4),
        (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT, 0o600),
    ]
    arguments = [path, *FLAGS, f"--user-data-dir={os.path.join(folder, 'profile')}", "about:blank"]
    pid = os.posix_spawn(path, arguments, os.environ, file_actions=actions, setpgroup=0)
    os.close(theirs_from)
    os.close(theirs_to)
    return pid, ours_to, ours_from


def _high(descriptor):
    """The same pipe end under a number of 10 or above."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FREE)
    os.close(descriptor)
    return moved


def _ended(pid, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    return False
