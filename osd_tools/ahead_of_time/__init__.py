"""Compiles a run for a machine that is not available, without executing it.

Every program of serving and learning is compiled for a named topology. The report
counts operations of the compiled programs and bytes of memory. Times are lower bounds
estimated from the chip's published figures, and the report labels them as estimates.
"""

import dataclasses

import jax

from osd_jax import base, certificate, online, pairs, runs, session
from osd_jax.report import progress
from osd_tools import chips
from osd_tools import rows as tool_rows
from osd_tools.ahead_of_time import estimates
from osd_tools.ahead_of_time import plan as plan_lib
from osd_tools.ahead_of_time import programs as programs_lib


@dataclasses.dataclass(frozen=True)
class CompileConfig(base.Config):
  """A machine, and the run that is compiled for it.

  Attributes:
    run: the run of `osd online`; its stream is not read. A target or draft whose path
      ends in a published name, such as "flan-t5-xl", needs no weights; they count in
      `PairConfig.dtype`. If the path exists, its tensors count in their stored type.
    topology: the machine: "v5e:2x2", "v4:2x2x1", "v6e:2x4" or "h100:4"; "cpu:1" needs
      no further compiler. `PartitionConfig` sets the number of chips that are used.
    run_directory: folder for the report.
    overwrite: remove the run in this directory and start over.
  """

  run: online.OnlineConfig
  topology: str = "v5e:2x2"
  run_directory: base.Folder = "runs/compile"
  overwrite: bool = False

  def checks(self):
    chips.Topology(self.topology)  # raises InputError for an unknown machine
    has_paths = isinstance(self.run.pair, pairs.PairConfig)
    return {"run": (has_paths, "an OnlineConfig whose pair is a PairConfig")}


def run(config: CompileConfig, operative_config: str = "") -> runs.RunResult:
  """Compiles every program, prints the tables and writes the report.

  `operative_config` is gin text that is stored in the run directory.
  """
  # With the cache, the times of compilation would be those of reading a file.
  jax.config.update("jax_enable_compilation_cache", False)
  topology = chips.Topology(config.topology)
  plan = plan_lib.Plan(config.run, topology)

  def body(config, directory, console):
    with (
      runs.MetricsLog(directory.metrics_path) as log,
      progress.bar(console) as bar,
    ):
      log.truncate(0)
      programs = programs_lib.programs(plan)
      task = bar.add_task("compile", total=len(programs), figures="")
      programs_by_name = {}
      for name, program in programs.items():
        bar.update(task, description=name)
        try:
          programs_by_name[name] = programs_lib.compiled(plan, program)
          log.write(tool_rows.Program(program=name, **vars(programs_by_name[name])))
        except programs_lib.RefusedError as error:
          log.write(tool_rows.Refused(program=name, text=f"{name} {error}"))
        bar.advance(task)
      for row in estimates.conclusions(plan, programs_by_name):
        log.write(row)
    return certificate.Certificate(), ""

  return session.run(config, operative_config, config.run.learning.seed, body)
