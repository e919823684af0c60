"""Python processes that qsync starts find what the process that starts them finds."""

from __future__ import annotations

import subprocess
import sys

STARTS = """
import subprocess, sys
sys.path.append({added!r})
import ours
from qsync.processes.child_processes import environment
for how in (["-c", "import random, ours, qsync.errors"], ["-m", "ours"]):
    subprocess.run([sys.executable, *how], env=environment(OURS="set"), check=True)
"""


def test_no_file_of_the_current_folder_hides_a_module_and_what_a_script_added_is_found(tmp_path):
    added, here = tmp_path / "added", tmp_path / "here"
    added.mkdir(), here.mkdir()
    (added / "ours.py").write_text("import os\nif __name__ == '__main__':\n    print(os.environ['OURS'])")
    (here / "random.py").write_text("raise SystemExit('this is not the standard library')")
    script = tmp_path / "script.py"
    script.write_text(STARTS.format(added=str(added)))
    done = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set\n"), done.stderr
