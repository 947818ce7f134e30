"""Prompt lookup of transformers, on the same requests as a system of `run.py`."""

from collections.abc import Sequence

import torch
import transformers

from osd_jax.engine.requests import Request

transformers.logging.set_verbosity_error()


class HuggingFace:
  """`generate`, plain or with `prompt_lookup_num_tokens`, one request at a time."""

  def __init__(
    self,
    folder: str,
    requests: Sequence[Request],
    length: int,
    drafted: int,
    dtype: str = "float32",
    assistant: str = "",
  ):
    """Loads the model.

    Args:
      folder: weights and config.
      requests: all requests of the stream.
      length: largest number of tokens of an answer.
      drafted: K; 0 for plain decoding.
      dtype: of the weights and of all computations.
      assistant: folder of a smaller model that drafts; its number of tokens follows
        transformers' own schedule.
    """

    def loaded(path):
      model = transformers.AutoModelForCausalLM.from_pretrained
      return model(path, dtype=getattr(torch, dtype)).eval()

    self._model = loaded(folder)
    self._assistant = loaded(assistant) if assistant else None
    self._requests, self._length, self._drafted = requests, length, drafted
    self._counts: list[tuple[int, int]] = []
    self._calls = 0
    self._model.register_forward_hook(self._count)

  def _count(self, *_) -> None:
    self._calls += 1

  @torch.inference_mode()
  def serve(self, start: int, stop: int) -> None:
    """Answers requests start..stop - 1 of the stream."""
    for request in self._requests[start:stop]:
      prompt, before = torch.from_numpy(request.tokens)[None].long(), self._calls
      sampling = request.sampling
      options = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
      drafts = {"prompt_lookup_num_tokens": self._drafted} if self._drafted else {}
      drafts |= {"assistant_model": self._assistant} if self._assistant else {}
      text = self._model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=sampling.temperature > 0,
        max_new_tokens=self._length,
        repetition_penalty=1.0,
        **(options if sampling.temperature > 0 else {}),
        **drafts,
      )
      self._counts.append((text.shape[1] - prompt.shape[1], self._calls - before))

  def per_request(self) -> list[tuple[int, int]]:
    """Returns tokens and target calls of every answered request."""
    return self._counts

  def close(self) -> dict[str, float]:
    """Frees the model and returns an empty dict."""
    del self._model, self._assistant
    return {}
