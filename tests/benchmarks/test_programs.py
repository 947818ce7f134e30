"""Every benchmark and every experiment runs as a program, with tiny settings."""

import os
import shlex
import subprocess
import sys

import pytest
from conftest import xla_flags

pytestmark = pytest.mark.release

# Programs need none of these; without torch, they skip their rivals.
START = """
import pathlib, runpy, sys
sys.modules |= dict.fromkeys(("torch", "tensorflow", "seqio"))
import measure
measure.RESULTS = pathlib.Path("results").absolute()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = (  # settings of runs with a tiny pair
  "DecodingConfig.rows=2",
  "DecodingConfig.num_draft_tokens=3",
  "DecodingConfig.target_length=12",
  "UpdateConfig.steps_per_update=1",
  "UpdateConfig.length_multiple=6",
)
TINY = "--target tiny --draft tiny --source_length 8 --length 8 --turns 1"
# Command of a program -> texts in its output.
PROGRAMS = {
  "benchmarks/bench_greedy.py --shapes tiny --source 8 --target 8 --no_rivals": (
    "ours, ms/token",
    "ours over the memory bound",
  ),
  "benchmarks/bench_speculative.py --target tiny --drafts_with tiny --alphas .8"
  " --drafted 3 --draft float32 int8 --prompts 2 --source 8 --length 8 --turns 1"
  " --without_native --no_rivals": (
    "alpha 0.8, K 3, int8 draft, XLA alone, over plain",
    "alpha 0.8, the fastest of these, over plain",
  ),
  f"benchmarks/bench_adaptive.py {TINY} --candidates 0 3 --alphas .3 .9 --requests 2": (
    "adaptive, speed over plain",
    "adaptive, drafted per target call",
  ),
  "benchmarks/bench_target_alone.py --target shipped:demo_target.safetensors"
  " --file prompts.txt --answers 3 --lengths 8 --temperatures 0": (
    "8 tokens, temperature 0.0: ",
    "tokens per call",
  ),
  f"benchmarks/bench_batching.py {TINY} --rows 2 --alphas .5 --waves 1": (
    "alpha 0.5, drafted tokens accepted",
    "break-even alpha",
  ),
  "benchmarks/bench_compile.py --target tiny --draft tiny --source 8 --length 8"
  " --turns 1 --threads 1": (
    '"figure": "compilations after warm-up", "value": 0.0',
    "weights in memory to first token, s",
  ),
  "benchmarks/bench_learning.py --intervals 4 --requests_per_task 3 --seeds 1"
  " --threads 1 --bindings SMALL": (
    "between tokens, p99, ms",
    "tokens gained, share",
    "break-even, requests",
  ),
  "benchmarks/bench_whole_run.py --requests_per_task 3 --block 5 --seeds 1 --threads 1"
  " --attached attached --systems plain 'attached frozen' 'attached online'"
  " --bindings SMALL": (
    "cumulated_seconds",
    "attached online, break-even over attached frozen, requests",
    "attached online, mean overlap",
  ),
  "benchmarks/bench_serving.py --requests 8 --turns 2 --clients 8 --traces bursty"
  " --systems frozen online --threads 1 --bindings SMALL": (
    "overhead over the bare engine, tokens/s",
    "online over frozen, inter-token latency p99",
    "bursty at 0.7 of the capacity",
  ),
  "benchmarks/accelerator.py --tiny": (
    "kernels per plain step",
    "draft step over plain step (c)",
    "slice of an update, ms",
    "not compared with Hugging Face",
  ),
  "benchmarks/accelerator.py --tiny --seconds 0": (
    "skipped, time is up: serving of tiny, bfloat16, 1 row",
  ),
  "benchmarks/ahead_of_time.py --topology cpu:1=1 --target t5-small --layers 1"
  " --rows 1 --drafted 2": ("kernels a round", "frozen tokens/s at 0.8, at most"),
  "benchmarks/compilations.py --topology cpu:1 --family t5 --draft attached --rows 1": (
    "kernels of a layer",
    "refused rounds",
  ),
  "benchmarks/versions.py --shape tiny --turns 1 --pythons PYTHON PYTHON": (
    "plain step, XLA alone, ms",
    "verification of 6 tokens, over jax",
  ),
  "experiments/acceptance_rules/run.py --count 4 --num_draft_tokens 2"
  " --temperatures 1": ('"coupling_equal_to_plain": 1.0', '"block_over_rejection"'),
  "experiments/poisoned_learning/run.py --requests 2 --only greedy --out runs GIN": (
    '"learning": "nan rows", "outputs": 8, "outputs_unlike_greedy": 0',
  ),
  "experiments/drafters/run.py --requests 2 --block 4 --threads 1 --out cells.jsonl"
  " --systems cache 'online + cache' --bindings SMALL": (
    "online + cache",
    "over plain",
  ),
  "experiments/kill_test/run.py --kills 1 --out runs": (
    '"kills": 1, "runs": 1, "restarts_failed": 0, "unreadable_states": 0',
    '"differing_histories": 0, "differing_drafts": 0',
  ),
  "experiments/serving_kill/run.py --kills 1 --out runs": (
    '"kills": 1',
    '"lost": 0, "doubled": 0',
  ),
}


@pytest.mark.parametrize("command", PROGRAMS, ids=lambda text: text.split()[0][:-3])
def test_program_prints_its_figures(command, repository, lively_pair, tmp_path):
  small = [f"PairConfig.{x}={getattr(lively_pair, x)!r}" for x in ("target", "draft")]
  program, *words = shlex.split(command)
  path = repository / program
  words = [sys.executable if word == "PYTHON" else word for word in words]
  if words[-1] == "SMALL":
    words[-1:] = [*small, *SMALL]
  if words[-1] == "GIN":
    words[-1:] = [f"--gin={binding}" for binding in (*small, *SMALL)]
  (tmp_path / "prompts.txt").write_text("How many films are there?\n" * 3)
  paths = (repository / "benchmarks", repository)
  environment = {
    **os.environ,
    "XLA_FLAGS": xla_flags(1),
    "PYTHONPATH": os.pathsep.join(map(str, paths)),
    "OSD_BENCH_THREADS": "1",  # otherwise programs restart themselves
  }
  run = subprocess.run(
    [sys.executable, "-c", START, str(path), *words],
    capture_output=True,
    text=True,
    cwd=tmp_path,
    env=environment,
    timeout=300,
  )
  assert run.returncode == 0, run.stderr[-3000:]
  assert [text for text in PROGRAMS[command] if text not in run.stdout] == []
