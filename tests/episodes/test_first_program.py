"""The first program of docs/episodes.md runs as it is printed, with another model and fewer steps."""

import re
import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "episodes.md"
CHANGES = {
    "Qwen/Qwen3-0.6B": "{directory}",
    "steps=50": "steps=2, groups_per_step=2",
    "n=8, max_tokens=512": "n=2, max_tokens=8",
}


def test_the_first_program_runs(chat_dir, tmp_path):
    [program, *_] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for printed, changed in CHANGES.items():
        assert program.count(printed) == 1
        program = program.replace(printed, changed.format(directory=chat_dir))
    path = tmp_path / "first.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2"]
