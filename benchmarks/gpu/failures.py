"""Pytest plugin that writes each failed test and its reason to the log at once.

Pytest writes its own summary at the end. It is lost if `make gpu-check` ends a part at its limit. `check.py` prints
these lines.

    python -m pytest -p benchmarks.gpu.failures
"""

import pytest

MARK = "FAILED TEST "
"""Starts a line with the name of a failed test and its reason."""


class FailureWriter:
    def __init__(self, terminal: pytest.TerminalReporter):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
        self._terminal.ensure_newline()
        self._terminal.write_line(f"{MARK}{report.nodeid} ({report.when}): {' '.join(reason.split())[:300]}")
        self._terminal.flush()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # workers of pytest-xdist have none, and send their reports to a process that has one
        config.pluginmanager.register(FailureWriter(terminal))
