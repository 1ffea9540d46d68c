"""The adapter's folder is private, in memory, and gone with its process."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trl_pdm.weight_sync import adapter_files
from trl_pdm.weight_sync.adapter_files import private_folder


def run_python(code, **kwargs):
    code = textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), **kwargs)


def test_folder_is_private_and_in_memory():
    with private_folder(1000) as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert os.path.dirname(folder) == "/dev/shm" or not os.access("/dev/shm", os.W_OK)
    assert not os.path.exists(folder)


def test_folder_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files.tempfile, "tempdir", str(tmp_path))
    with private_folder(2**60) as folder:  # a container's /dev/shm may have 64 MB
        assert os.path.dirname(folder) == str(tmp_path)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    monkeypatch.setattr(adapter_files, "_SHARED_MEMORY", "/nonexistent")
    with private_folder(1) as folder:
        assert os.path.dirname(folder) == str(tmp_path)


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise RuntimeError('crash')", "raise KeyboardInterrupt"])
def test_folder_is_gone_after_the_process(end):
    process = run_python(
        f"""
        from trl_pdm.weight_sync.adapter_files import private_folder
        with private_folder(1) as folder:
            open(folder + "/adapter", "w").write("secret")
            print(folder, flush=True)
            {end}
        """,
        stderr=subprocess.DEVNULL,
    )
    folder = process.communicate(timeout=120)[0].strip()
    assert process.returncode != 0 and folder and not os.path.exists(folder)


def test_folder_of_a_killed_process_is_removed_at_the_next_start():
    code = """
        import time
        from trl_pdm.weight_sync.adapter_files import private_folder
        with private_folder(1) as folder:
            open(folder + "/adapter", "w").write("secret")
            print(folder, flush=True)
            time.sleep(600)
        """
    killed, alive = run_python(code), run_python(code)
    try:
        folders = [process.stdout.readline().strip() for process in (killed, alive)]
        assert all(map(os.path.exists, folders))
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
        assert os.path.exists(folders[0]), "nobody was there to remove it"
        adapter_files.remove_stale_folders()
        assert [os.path.exists(folder) for folder in folders] == [False, True]
    finally:
        alive.kill()
        alive.wait(60)
        adapter_files.remove_stale_folders()
    assert not os.path.exists(folders[1])


def test_a_folder_that_another_process_is_about_to_lock_stays(tmp_path, monkeypatch):
    locked = adapter_files._locked

    def late(folder, operation):
        monkeypatch.setattr(adapter_files, "_locked", locked)
        adapter_files.remove_stale_folders()  # what a process that starts now would do
        return locked(folder, operation)

    monkeypatch.setattr(adapter_files, "_locked", late)
    with private_folder(1) as folder:
        assert os.path.isdir(folder)


def test_stale_folder_is_never_followed_elsewhere(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    link = Path(adapter_files.tempfile.gettempdir(), f"{adapter_files._FOLDER_PREFIX}link-{os.getpid()}")
    link.symlink_to(tmp_path / "precious")
    try:
        adapter_files.remove_stale_folders()
        assert (tmp_path / "precious" / "file").exists()
    finally:
        link.unlink()
