"""The commit that a row of results is labelled with."""

import subprocess

import measure


def test_commit_is_dirty_only_if_code_changed(tmp_path, monkeypatch):
  folder = tmp_path / "benchmarks"
  results = folder / "results"
  results.mkdir(parents=True)
  monkeypatch.setattr(measure, "FOLDER", folder)
  names = ("results/a.jsonl", "README.md", "bench.py")
  for name in names:
    (folder / name).write_text("before")
  identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
  for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
    subprocess.run(("git", "-C", folder, *identity, *command), check=True)
  clean = measure.commit()
  for name in names[:2]:
    (folder / name).write_text("after")
  assert measure.commit() == clean and "dirty" not in clean
  (folder / "bench.py").write_text("after")
  assert measure.commit() == f"{clean}-dirty"
