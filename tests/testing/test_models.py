"""``check_model`` and ``tiny_checkpoint``: ours pass, and the suite names the bugs that are planted in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.models.checkpoints import write_checkpoint
from tests.testing.planted import Bug, Bugs, caught
from tokenizers import Tokenizer
from torch import Tensor

from infer import hookimpl
from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.model import ModelContext, ModelProtocol, ModelRegistration, Pass
from infer.contracts.states import State
from infer.kernels.reference import ReferenceKernels
from infer.weight import Weight
from infer_kernels_cpu.provider import CpuKernels
from infer_layers import Decoder
from infer_models import infer_models
from infer_models.lfm2 import Lfm2Config, Lfm2Layer
from infer_models.llama import LlamaConfig, LlamaLayer
from infer_testing import ConformanceError, check_model, tiny_checkpoint
from infer_testing.checkpoints import letters

MakeModel = Callable[[Any, ModelContext], ModelProtocol]
planted: Bugs[MakeModel] = Bugs([])
ARCHITECTURES = sorted(
    {
        name
        for r in infer_models()
        for name in r.architectures
        if r.name != "eagle3" and name.endswith("ForCausalLM")  # those are heads of models
    }
)
FAST = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    "architecture",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES],
)
def test_ours_pass_on_a_tiny_checkpoint(architecture: str) -> None:
    """What transformers makes of config.json's gaps is its own, and is tried with checkpoints that it has written."""
    against: Any = "transformers" if architecture in FAST else "none"
    check_model(tiny_checkpoint(architecture), kernels=CpuKernels(), against=against)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe", "gpt_oss", "phi3", "glm4"])
def test_ours_pass_on_checkpoints_that_transformers_writes(family: Any, tmp_path: Path) -> None:
    window = 9 if family in ("gemma3", "gpt_oss") else None
    folder = write_checkpoint(tmp_path, family, window=window, seed=3)
    check_model(folder, kernels=CpuKernels(), against="transformers")


@functools.cache
def checkpoint() -> Path:
    return tiny_checkpoint("LlamaForCausalLM")


@planted.each
def test_a_planted_bug_is_named(bug: Bug[MakeModel]) -> None:
    def registered() -> list[ModelRegistration]:
        make = lambda config, context, settings: bug.make(config, context)  # noqa: E731
        return [ModelRegistration("planted", make, "with a bug", architectures=("LlamaForCausalLM",))]

    plugin = SimpleNamespace(INFER_PLUGIN_API=2, infer_models=hookimpl(registered))
    caught(bug, lambda **keys: check_model(checkpoint(), family="planted", plugins=[plugin], **keys))


(LLAMA,) = [r for r in infer_models() if "LlamaForCausalLM" in r.architectures]


class Wrapped:
    """A model of Llama's family that subclasses change."""

    def __init__(self, config: Any, context: ModelContext) -> None:
        self.inner: Any = LLAMA.factory(config, context, LLAMA.settings())

    @property
    def attention(self) -> list[AttentionSpec]:
        return [*self.inner.attention]

    @property
    def vocab_size(self) -> int:
        return int(self.inner.vocab_size)

    def forward(self, batch: Pass) -> Tensor:
        hidden: Tensor = self.inner.forward(batch)
        return hidden

    def logits(self, hidden_ND: Tensor) -> Tensor:
        logits: Tensor = self.inner.logits(hidden_ND)
        return logits

    def expected(self) -> dict[str, tuple[int, ...]]:
        return dict(self.inner.expected())

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        self.inner.load(tensors)


@planted("the model keeps views of the file's tensors", "copies", "model.norm.weight .* load keeps no tensor")
class KeepsViews(Wrapped):
    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        kept = [*tensors]
        super().load(kept)
        self.inner.norm.weight_D = dict(kept)["model.norm.weight"]


TRANSFORMERS = "transformers"


@planted("rotary frequencies have another base", TRANSFORMERS, "but not for the first token: attention or positions")
def other_base(config: Any, context: ModelContext) -> ModelProtocol:
    return Wrapped({**config, "rope_theta": 500.0}, context)


@planted("norms have another epsilon", TRANSFORMERS, "at position 0 are off by .*, from the first token on")
def other_eps(config: Any, context: ModelContext) -> ModelProtocol:
    return Wrapped({**config, "rms_norm_eps": 1.0}, context)


@planted("the head is the embedding, though it has weights of its own", TRANSFORMERS, "from the first token on")
class TiedHead(Wrapped):
    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        given = dict(tensors)
        super().load({**given, "lm_head.weight": given["model.embed_tokens.weight"]}.items())


class Windowed(Wrapped):
    def __init__(self, config: Any, context: ModelContext) -> None:
        super().__init__(config, context)
        self.inner.attention = tuple(replace(spec, window=20) for spec in self.inner.attention)


planted(
    "all layers have a window that the checkpoint does not name",
    TRANSFORMERS,
    r"position \d\d are off by .*but not before: a window \(attention's are \[20\]\)",
)(Windowed)


@planted("positions count from the beginning of a pass", "chunks", r"position \d+ has other bits in the chunk")
class FromZero(Wrapped):
    def forward(self, batch: Pass) -> Tensor:
        return super().forward(replace(batch, positions_T=torch.arange(len(batch.token_ids_T))))


@planted("hidden states are scaled by their mean over the pass", "company", "something is shared between sequences")
class PassMean(Wrapped):
    def forward(self, batch: Pass) -> Tensor:
        hidden = super().forward(batch)
        return hidden / hidden.float().abs().mean().to(hidden.dtype)


@planted("the last pass's state goes into the next one", "company", "has other bits in a pass")
class Remembers(Wrapped):
    last: Tensor | None = None

    def forward(self, batch: Pass) -> Tensor:
        hidden = super().forward(batch)
        before, self.last = self.last, hidden[-1:].clone() if len(hidden) else self.last
        return hidden if before is None else hidden + 0.1 * before


@planted("a prefix is kept by the model, too", "prefix", r"after a prefix of \d+ cached tokens")
class KeepsPrompt(Wrapped):
    seen = 0

    def forward(self, batch: Pass) -> Tensor:
        begins = int(batch.positions_T.min())
        self.seen = begins + len(batch.token_ids_T) if begins == 0 else self.seen
        hidden = super().forward(batch)
        return hidden if begins == 0 else hidden * (1 + self.seen / 64)


@planted("wanted rows come in the order of the pass", "shapes", "another hidden state for token")
class Sorted(Wrapped):
    def forward(self, batch: Pass) -> Tensor:
        rows = batch.rows_N
        return super().forward(batch if rows is None else replace(batch, rows_N=rows.sort().values))


@planted("a pass of which nothing is wanted fails", "shapes", "raised IndexError")
class NeedsRows(Wrapped):
    def forward(self, batch: Pass) -> Tensor:
        hidden = super().forward(batch)
        hidden[-1]
        return hidden


@planted("logits are in float32", "shapes", "logits gives .* of torch.float32, not .* of torch.bfloat16")
class WideLogits(Wrapped):
    def logits(self, hidden_ND: Tensor) -> Tensor:
        return super().logits(hidden_ND).float()


@planted("missing weights stay random", "loading", "load raises no error although .* is missing")
class Lenient(Wrapped):
    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        given = dict(tensors)
        super().load((given | {n: torch.ones(s) for n, s in self.expected().items() if n not in given}).items())


@planted("weights of another model are ignored", "loading", "that expected does not name")
class Deaf(Wrapped):
    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        super().load((name, tensor) for name, tensor in tensors if name in self.expected())


@planted("a wrong shape raises what torch raises", "loading", "raises a RuntimeError although .* has another shape")
class Copies(Wrapped):
    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        given = dict(tensors)
        for name, shape in self.expected().items():
            if isinstance(tensor := given.get(name), Tensor):
                torch.zeros(shape).copy_(tensor)
        super().load(given.items())


@planted("tokens are looked up in a table of Python's", "recorded", "has other bits in a replay than in a run")
class OnHost(Wrapped):
    known: tuple[Any, list[int]] | None = None

    def forward(self, batch: Pass) -> Tensor:
        if self.known is None or self.known[0] is not batch:
            self.known = batch, batch.token_ids_T.tolist()
        return super().forward(replace(batch, token_ids_T=torch.tensor(self.known[1])))


@planted("queries are rotated, keys are not, from the second pass on", "chunks", "has other bits in the chunk")
class HalfTurned(Wrapped):
    def forward(self, batch: Pass) -> Tensor:
        class View:
            def attend(
                self,
                layer: int,
                q_THE: Tensor,
                k_TKE: Tensor | None,
                v_TKE: Tensor | None,
                rotary: Rotary | None = None,
            ) -> Tensor:
                if rotary is not None and k_TKE is not None and int(batch.positions_T[0]) > 0:
                    q_THE, _ = ReferenceKernels().rope(q_THE, k_TKE, rotary)
                    rotary = None
                return cache.attend(layer, q_THE, k_TKE, v_TKE, rotary)

        cache: KVCacheView = batch.cache
        return super().forward(replace(batch, cache=View()))


def test_names_that_transformers_does_not_have_are_said() -> None:
    class Renamed(LlamaConfig):
        norm_name: ClassVar[str] = "model.last_norm"

    def registered() -> list[ModelRegistration]:
        make = lambda config, context, settings: Decoder(config, context, Renamed, LlamaLayer)  # noqa: E731
        return [ModelRegistration("renamed", make, "a typo", architectures=("LlamaForCausalLM",), priority=1)]

    plugin = SimpleNamespace(INFER_PLUGIN_API=2, infer_models=hookimpl(registered))
    folder = tiny_checkpoint("LlamaForCausalLM", plugins=[plugin])
    says = "it needs model.norm.weight, which the family does not name; it does not know model.last_norm.weight"
    with pytest.raises(ConformanceError, match=re.escape(says)):
        check_model(folder, plugins=[plugin], only=["transformers"])


def test_a_model_that_ignores_its_window_is_named() -> None:
    class Whole(LlamaConfig):
        sliding_window: int | None = None

    def registered() -> list[ModelRegistration]:
        make = lambda config, context, settings: Decoder(config, context, Whole, LlamaLayer)  # noqa: E731
        return [ModelRegistration("whole", make, "no window", architectures=("MistralForCausalLM",), priority=1)]

    plugin = SimpleNamespace(INFER_PLUGIN_API=2, infer_models=hookimpl(registered))
    folder = tiny_checkpoint("MistralForCausalLM")
    says = r"at position \d\d are off by .*but not before: a window \(attention's are none\)"
    with pytest.raises(ConformanceError, match=says):
        check_model(folder, plugins=[plugin], only=["transformers"])


@pytest.mark.parametrize("only", ["chunks", "company", "prefix"])
def test_a_model_that_forgets_its_states_is_named(only: str) -> None:
    class Forgetful(Decoder):
        def forward(self, batch: Pass) -> Tensor:
            class View:
                attend = batch.cache.attend

                def state(self, layer: int) -> State:
                    parts, rows = view.state(layer)
                    return State(parts, rows._replace(read_B=torch.zeros_like(rows.read_B)))

            view: Any = batch.cache
            return super().forward(replace(batch, cache=View()))

    def registered() -> list[ModelRegistration]:
        make = lambda config, context, settings: Forgetful(config, context, Lfm2Config, Lfm2Layer)  # noqa: E731
        return [ModelRegistration("forgetful", make, "no past", architectures=("Lfm2ForCausalLM",), priority=1)]

    plugin = SimpleNamespace(INFER_PLUGIN_API=2, infer_models=hookimpl(registered))
    folder = tiny_checkpoint("Lfm2ForCausalLM")
    with pytest.raises(ConformanceError, match="has other bits"):
        check_model(folder, family="forgetful", plugins=[plugin], only=[only])


def test_a_checkpoint_that_the_family_cannot_load_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", str(tmp_path), attention_bias=True)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"attention_bias": true', '"attention_bias": false'))
    with pytest.raises(ConformanceError, match=r"raised CheckpointError: .*k_proj.bias'"):
        check_model(folder, only=["shapes"])


def test_a_vocabulary_may_be_larger_than_a_plane_of_unicode() -> None:
    made = Tokenizer.from_str(letters(60_013).to_str())
    assert made.get_vocab_size() == 60_013
    assert tiny_checkpoint("LlamaForCausalLM", vocab_size=60_013).is_dir()
