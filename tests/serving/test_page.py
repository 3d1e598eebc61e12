"""The page to chat, in a browser without a screen. Skipped where PyQt6-WebEngine (Chromium) is
missing."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from served import Running, settled

import kvqjax as kvq

HAS_BROWSER = all(importlib.util.find_spec(name) for name in ("PyQt6", "PyQt6.QtWebEngineWidgets"))

# Loads a page, runs JavaScript in it, and prints what that leaves in `window.report`.
BROWSER = """
import sys
from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

app = QApplication(["browser"])
view, timer = QWebEngineView(), QTimer()
view.loadFinished.connect(lambda _: view.page().runJavaScript(sys.argv[2]))

def reported(text):
    if text:
        print(text, flush=True)
        app.quit()

timer.timeout.connect(lambda: view.page().runJavaScript("window.report || ''", reported))
timer.start(50)
QTimer.singleShot(100_000, lambda: app.exit(3))
view.load(QUrl(sys.argv[1]))
sys.exit(app.exec())
"""

# What a user does: looks, types, sends, reads; sends again, and stops the answer when it begins.
USER = """
(async () => {
  const until = async (what) => { while (!what()) await new Promise((go) => setTimeout(go, 10)); };
  const lines = () => [...document.querySelectorAll("#talk div")].map((line) => [line.className, line.textContent]);
  const idle = () => !element("send").disabled;
  const report = {};
  await until(() => element("figures").textContent.includes("MiB"));
  report.begin = element("figures").textContent;
  let pieces = 0;
  new MutationObserver(() => pieces++).observe(element("talk"), { childList: true, subtree: true });
  element("text").value = "The baker came home.";
  element("text").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", cancelable: true }));
  await until(() => !idle());
  await until(idle);
  await until(() => element("figures").textContent.includes("second"));
  report.pieces = pieces;
  report.end = element("figures").textContent;
  report.first = lines();
  new MutationObserver(() => { if (lines()[3]?.[1]) element("stop").click(); }).observe(
    element("talk"), { childList: true, subtree: true });
  element("text").value = "Again";
  element("send").click();
  await until(() => !idle());
  await until(idle);
  report.second = lines().slice(2);
  window.report = JSON.stringify(report);
})();
"""


@pytest.mark.skipif(not HAS_BROWSER, reason="PyQt6-WebEngine is not installed")
def test_a_user_talks_and_stops_an_answer():
    model = kvq.load("demo")
    before, model.tokenizer.chat_template = (
        model.tokenizer.chat_template,
        "{{ messages[-1].content }}",
    )
    engine = kvq.Engine(model, "kivi:bits=4,window=32", rows=1, capacity=1024, chunk=64, stride=2)
    with Running(engine) as port:
        command = [sys.executable, "-c", BROWSER, f"http://127.0.0.1:{port}/", USER]
        environment = os.environ | {
            "QT_QPA_PLATFORM": "offscreen",
            "QTWEBENGINE_DISABLE_SANDBOX": "1",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        stats = settled(engine, running=0, waiting=0)
    model.tokenizer.chat_template = before  # models of one folder share its tokenizer
    report = json.loads(done.stdout)
    assert report["begin"].startswith("small: cache of ")
    assert report["begin"].endswith(" bits a number")
    assert report["end"].startswith(report["begin"])
    assert float(report["end"].split(", ")[-1].removesuffix(" tokens a second")) > 0
    user, assistant = report["first"]
    assert user == ["user", "The baker came home."]
    assert assistant[0] == "assistant"
    assert assistant[1]
    assert report["pieces"] > 5  # the answer comes piece by piece
    assert report["second"][0] == ["user", "Again"]
    assert report["second"][1][0] == "assistant"  # no error
    assert stats.aborted == 1
