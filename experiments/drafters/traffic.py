"""The streams of `run.py`, each with the config of a run."""

import argparse
import ast
import dataclasses
import json
import pathlib

from osd_jax import online
from osd_jax.data.examples import TaskConfig
from osd_jax.main import settings

_EDIT = (
  "Rename the function {old} to {new} in this code and print all of the code again."
  " Answer with code only.\n```python\n{code}\n```"
)
# Stream -> pair; see `_files`.
PAIRS = {
  "demo": "demo",
  "domains": "small",
  "chat": "small",
  "qwen": "qwen",
  "qwen_chat": "qwen",
  "qwen_edit": "qwen",
}


def config_of(
  name: str, args: argparse.Namespace, temperature: float, rows: int, seed: int
) -> online.OnlineConfig:
  """Returns the config of a learning run on a stream.

  Args:
    name: a key of `PAIRS`.
    args: options of the command line.
    temperature: of every request.
    rows: requests in flight.
    seed: of the stream, of sampling and of learning.
  """
  files, bindings = _files(PAIRS[name], args)
  bindings += [
    f"SamplingConfig.temperature={temperature}",
    f"DecodingConfig.rows={rows}",
    "DecodingConfig.cache_tokens=0",  # `run.create` adds the cache
    f"StreamConfig.requests_per_task={args.requests}",
    *(f"{kind}.seed={seed}" for kind in ("StreamConfig", "LearningConfig")),
    f"SamplingConfig.seed={1000 * seed}",
    *args.bindings,
  ]
  config, _ = settings.load(online.OnlineConfig, files, bindings)
  if not args.by_worth:
    fixed = dataclasses.replace(config.decoding, adaptive=None)
    config = dataclasses.replace(config, decoding=fixed, measure_costs=False)
  if tasks := _tasks(name, args):
    stream = dataclasses.replace(config.stream, tasks=tasks)
    config = dataclasses.replace(config, stream=stream)
  return config


def _files(pair: str, args: argparse.Namespace) -> tuple[list[str], list[str]]:
  """Returns gin files and bindings of a pair."""
  end = "_by_worth" if args.by_worth else ""
  if pair == "demo":
    return [f"runs/demo{end}.gin"], []
  bindings = [f"DATA_DIR={str(args.data)!r}"]
  if pair == "small":
    bindings += [
      f"VOCABULARY={str(args.data / 'tokenizers/t5/spiece.model')!r}",
      f"PairConfig.target={str(args.target)!r}",
      f"PairConfig.draft={str(args.draft)!r}",
    ]
    return [f"experiments/shift_cpu_attached{end}.gin"], bindings
  bindings += [f"QWEN={str(args.qwen)!r}", f"PairConfig.draft={args.qwen_draft!r}"]
  return [f"experiments/qwen{end}.gin"], bindings


def _tasks(name: str, args: argparse.Namespace) -> tuple[TaskConfig, ...]:
  """Returns the tasks of a stream; () keeps those of the gin file."""
  if name in ("chat", "qwen_chat"):
    return tuple(
      TaskConfig(
        name=source,
        data_dir=str(args.data),
        pattern=f"{source}.{{split}}.jsonl",
        split="eval",
      )
      for source in ("dolly", "arena")
    )
  if name == "qwen_edit":
    args.out.parent.mkdir(parents=True, exist_ok=True)
    path = args.out.parent / "edits.jsonl"
    rows = edits(args.data / "python.eval.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = str(path.parent.absolute())
    return (
      TaskConfig(name="edits", data_dir=folder, pattern=path.name, rows=args.requests),
    )
  return ()


def edits(path: pathlib.Path, longest: int = 260) -> list[dict[str, str]]:
  """Returns prompts that ask for code to be repeated with a function renamed.

  Args:
    path: JSONL with Python functions as references.
    longest: characters of the code; longer functions are left out.
  """
  rows = []
  for line in path.read_text().splitlines():
    code = json.loads(line)["reference"]
    try:
      first = ast.parse(code).body[0]
    except SyntaxError:  # Python 2
      continue
    if len(code) <= longest and isinstance(first, ast.FunctionDef):
      new = f"new_{first.name}"
      prompt = _EDIT.format(old=first.name, new=new, code=code)
      rows.append({"prompt": prompt, "reference": code.replace(first.name, new)})
  return rows
