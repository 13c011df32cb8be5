"""A headless Chromium, driven by the DevTools protocol over a pipe: no library in between."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The program, if there is one on this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab of a browser of its own.

    Args:
        program: the browser.
        profile: an empty folder.
    """

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The protocol's descriptors are 3 and 4; the shell puts them there.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}")
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", program, *flags],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._out = open(ours_out, "wb", buffering=0)  # noqa: SIM115
        self._in = open(ours_in, "rb")  # noqa: SIM115
        self._numbers = itertools.count(1)
        self._session: str | None = None
        # What the page wrote to its console, and requests that were blocked or failed.
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol. Raises AssertionError when it fails."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Log.entryAdded":
                self.complaints.append(answer["params"]["entry"]["text"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(answer["params"]["exceptionDetails"]))

    def _receive(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            raw += byte
        return json.loads(raw)

    def open(self, url: str) -> None:
        """Goes to an address and waits until the page's scripts have begun."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, (
                f"{script} did not come true; {self.evaluate('document.body.innerText')}"
            )
            time.sleep(0.05)

    def screenshot(self, path: Path, width: int, height: int, scheme: str) -> None:
        """A picture of the page at this size, in the light or dark scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(20)
        self._in.close()
        self._out.close()
