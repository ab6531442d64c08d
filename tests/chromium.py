"""A headless Chromium, driven over its DevTools protocol through a pipe: no port, no library."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0
COMMANDS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium():
    """The path of a Chromium, or None."""
    return next((path for name in COMMANDS if (path := shutil.which(name))), None)


class Page:
    """A page in the browser, and everything that it complained of or asked for."""

    def __init__(self, write, read):
        self.write, self.read = write, read
        self.number, self.session, self.events, self.buffer = 0, None, [], b""
        self.target = None

    def open(self, path, width=1280, height=900, dark=False):
        """Load a file in a new page instead of the last one, and wait until it is there."""
        self.session, last = None, self.target
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if last:
            self.call("Target.closeTarget", targetId=last)
        attached = self.call("Target.attachToTarget", targetId=self.target, flatten=True)
        self.session, self.events = attached["sessionId"], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.prefer("dark" if dark else "light")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def prefer(self, scheme):
        """What the reader's system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, expression):
        """Return the value of a JavaScript expression; raise its exceptions."""
        said = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in said:
            raise AssertionError(said["exceptionDetails"])
        return said["result"].get("value")

    def picture(self, path, whole=True, **clip):
        """Save a PNG of the page, or of a part of it."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        area = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], **clip}
        options = {"captureBeyondViewport": whole, "clip": {**area, "scale": 1}}
        shot = self.call("Page.captureScreenshot", format="png", **options)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def printed(self, path):
        """Save the page as PDF, as it prints."""
        said = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        Path(path).write_bytes(base64.b64decode(said["data"]))

    def complaints(self):
        """Errors and warnings on the console, and uncaught exceptions."""
        logged = [e["params"]["entry"]["text"] for e in self._all("Log.entryAdded")]
        thrown = [
            e["params"]["exceptionDetails"]["text"] for e in self._all("Runtime.exceptionThrown")
        ]
        said = [
            str(e["params"]["args"])
            for e in self._all("Runtime.consoleAPICalled")
            if e["params"]["type"] in ("error", "warning", "assert")
        ]
        return logged + thrown + said

    def requests(self):
        """The addresses of everything that the page asked for."""
        return [e["params"]["request"]["url"] for e in self._all("Network.requestWillBeSent")]

    def _all(self, method):
        return [event for event in self.events if event["method"] == method]

    def call(self, method, **params):
        """Send a command and wait for its answer."""
        self.number += 1
        words = {"id": self.number, "method": method, "params": params}
        if self.session:
            words["sessionId"] = self.session
        os.write(self.write, json.dumps(words).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            pass
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["result"]

    def receive(self):
        """The next message; an event is kept."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], PATIENCE)
            more = os.read(self.read, 1 << 20) if ready else b""
            if not more:
                raise AssertionError("Chromium has gone away, or is stuck")
            self.buffer += more
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def chromium():
    """A browser for the time of a with block."""
    to_it, ours_out = os.pipe()
    ours_in, from_it = os.pipe()

    def place():
        # The browser reads commands from descriptor 3 and answers on 4.
        high = [os.dup2(to_it, 60), os.dup2(from_it, 61)]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [
            find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={profile}",
            "--disable-background-networking", "--force-color-profile=srgb",
        ]  # fmt: skip
        process = subprocess.Popen(
            words, preexec_fn=place, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(to_it)
        os.close(from_it)
        page = Page(ours_out, ours_in)
        try:
            yield page
            page.session = None
            page.call("Browser.close")
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
            os.close(ours_out)
            os.close(ours_in)
