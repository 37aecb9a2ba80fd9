"""Any causal language model of transformers, from the text of its config.json (`model.config`): built on the meta device, called like the
built-in decoder. `models/init` calls it.

The model is an instance of a subclass of its own class, not a wrapper around it, so that parameters have the names that transformers gives
them and an export is a copy. Its layers are the unmodified Python of transformers; only attention and experts take a way through interfaces
that transformers offers (`models/hf_attention`, `models/hf_experts`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.kernels.document_attention import DocumentSpans
from phalanx.models import hf_attention, hf_experts
from phalanx.models.attention import Scope
from phalanx.models.hf_attention import NAME
from phalanx.models.hf_initial import InitialValues
from phalanx.models.layer_list import layers_path
from phalanx.models.tied_weights import borrow
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

_OWN_ATTENTION = {"falcon": "mask", "gptj": "positions", "codegen": "positions", "gpt_neo": "positions"}
"""Types of models whose attention is not behind the interface, and how they keep documents apart all the same: by a mask of four dimensions, which
transformers takes as it is, or by positions that begin again, in which transformers itself finds documents. Tests compare each with its
documents run one by one."""


_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_top_k")
"""What configs call the number of experts that a token is sent to."""
_ROUTER = re.compile(r"\b(router|gate)\.(\w+\.)?weight$")


def build(spec: ModelSpec) -> nn.Module:
    """The model on the meta device. Raises RunError if transformers cannot build it."""
    with _disable_current_modes():  # a rehearsal's tensors have no values, and buffers are computed here
        model = _construct(spec, NAME)
        attentions = [] if model is None else hf_attention.prepare(model)
        if not attentions:
            model = _construct(spec, None)
        model.attentions, model.expert_layers = tuple(attentions), tuple(hf_experts.prepare(model))
        if not attentions and not getattr(model.config, "alibi", False):
            model.documents_by = _OWN_ATTENTION.get(model.config.model_type)
        model.spec, model.layers_path = spec, layers_path(model)
        for module in model.modules():
            _keep_buffers(module)
        for target, source in dict(model.all_tied_weights_keys).items():
            borrow(model, target, source)
    return model


def initial(model: Any) -> Mapping[str, str]:
    """Initial values of every parameter, as transformers sets them: name to rule of `models/init`."""
    table: Mapping[str, str] = model.initial_values
    return table


def unused(model: Any) -> int:
    """Parameters that one token does not use: those of the experts that it is not sent to."""
    text = model.config.get_text_config()
    active = next((count for name in _ACTIVE if isinstance(count := getattr(text, name, None), int)), None)
    if active is None:
        return 0
    experts = [
        module for module in model.modules() if hasattr(module, "_is_expert_parallel")
    ]  # behind the interface for experts
    return sum(
        parameter.numel() - parameter.numel() * active // len(parameter)
        for module in experts
        for parameter in module.parameters()
        if parameter.ndim == 3 and len(parameter) > active
    )


def unread(model: Any) -> Iterator[str]:
    """Patterns of tensors that a folder may have and the model does not need: those that transformers ignores, and the tied ones."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    yield from (f"^{re.escape(name)}$" for name in model.all_tied_weights_keys)


def axes(model: Any) -> Mapping[str, tuple[str, ...]]:
    """Names for the dimensions of every parameter. They say that nothing is cut, and what keeps its precision (a router) or has no adapter (the
    head)."""
    head = model.get_output_embeddings()
    heads = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    return {
        name: ("vocab", "model")
        if name in heads
        else tuple(_dimensions(name, parameter.ndim, name.rpartition(".")[0] in model.expert_layers))
        for name, parameter in model.named_parameters()
    }


def _dimensions(name: str, count: int, of_experts: bool) -> Iterator[str]:
    if of_experts:
        yield "expert"
        count -= 1
    last = ("rows", "columns") if _ROUTER.search(name) is None else ("route", "columns")
    yield from [*(f"stack_{index}" for index in range(count - 2)), *last][-count:] if count else ()


def one_document(model: Any) -> str | None:
    """Why the model cannot keep the documents of a sequence apart; None: it can."""
    layers = model.config.get_text_config().num_hidden_layers
    if len(model.attentions) >= layers or model.documents_by is not None:
        return None
    if model.attentions:
        return f"only {len(model.attentions)} of its {layers} layers compute attention; what the others carry from position to position knows no documents"
    return "its attention does not use the attention interface of transformers"


def open_head(model: Any) -> bool:
    """Gives the model an attribute `project`, as the built-in decoder has, if its logits are the product of the last states with the head and
    nothing more. Then the loss can be computed from the two, some tokens at a time."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None or not _is_plain(type(model).__mro__[2]):
        return False
    model.project = linear
    head.forward = partial(_project, head)
    return True


_HEAD = re.compile(r"\blogits = self\.\w+\(hidden_states(\[:, slice_indices, :\])?\)\n")


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether the class returns what its head returns. Its source says so: it assigns logits once."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return len(_HEAD.findall(source)) == 1 and len(re.findall(r"\blogits\w* *[-+*/]?= ", source)) == 1


def _project(head: nn.Linear, x_BSD: Tensor) -> Any:
    return _projects.get()(x_BSD, head.weight)


_projects: ContextVar[Callable[[Tensor, Tensor], Any]] = ContextVar("_projects", default=linear)
"""The `project` of the model whose forward runs: a pipeline stage is a copy of the model that shares its head."""


class _Decoder:
    """What the subclass of a transformers model adds to it."""

    training: bool
    takes_spans = True
    takes_positions = True
    """Whether positions are an input; otherwise it counts them itself."""
    documents_by: str | None = None
    """How documents are kept apart where attention is not behind the interface, as in `_OWN_ATTENTION`."""

    def forward(
        self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None, spans: DocumentSpans | None = None
    ) -> Tensor:
        """Logits [B, S, V]. Positions and documents are inputs, as in `models/decoder`."""
        options: dict[str, Any] = {"position_ids": positions_BS} if self.takes_positions else {}
        if self.documents_by == "mask" and documents_BS is not None:
            options["attention_mask"] = Scope(documents_BS).mask(tokens_BS.shape[1], tokens_BS.device)
        token = _projects.set(getattr(self, "project", linear))
        try:
            with hf_attention.documents(documents_BS, spans):
                logits: Tensor = super().forward(input_ids=tokens_BS, use_cache=False, return_dict=True, **options).logits  # type: ignore[misc]
        finally:
            _projects.reset(token)
        return logits

    def train(self, mode: bool = True) -> Any:
        """Layers are always in evaluation mode, in which there is no dropout, no skipped layer and no noise in a router: as in the built-in
        decoder, what a step computes does not depend on random numbers."""
        super().train(False)  # type: ignore[misc]
        self.training = mode
        return self


def _class_and_config(spec: ModelSpec) -> tuple[type[Any], Any]:
    """The class of transformers that the config names, and the config as it reads it."""
    assert spec.config is not None, "`models/init` builds other models"
    try:
        import transformers
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: F401  # of version 5
    except ImportError as error:
        raise RunError(
            f"model.config needs transformers 5 or newer, which cannot be imported here ({error}): install it with `pip install phalanx[hf]`."
        ) from None
    values = json.loads(spec.config)
    name = values.pop("model_type")
    if name not in CONFIG_MAPPING:
        raise RunError(
            f'model.config: model_type = "{name}" is unknown to transformers {transformers.__version__}: install the version that the model needs.'
        )
    try:
        kind = CONFIG_MAPPING[name]
        config = kind.from_dict(kind._decode_special_floats(values))  # JSON has no infinity: transformers writes a table for it
    except Exception as error:  # a value of the wrong kind may raise anything
        raise RunError(f"model.config: transformers cannot read it: {type(error).__name__}: {error}.") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RunError(
            f'model.config: transformers has no causal language model of model_type = "{name}", only other kinds: name a decoder that predicts '
            "the next token."
        )
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    named = config.architectures or []
    if isinstance(kinds, list | tuple):
        kinds = next((kind for kind in kinds if kind.__name__ in named), kinds[0])
    text = config.sub_configs.get("text_config")
    if text is not None and kinds.config_class == text:  # of a model of text and images, the text alone
        config = config.get_text_config()
    elif named and kinds.__name__ not in named and any(hasattr(transformers, other) for other in named):
        raise RunError(
            f'model.config: architectures = {json.dumps(named)}, but the causal language model of model_type = "{name}" is {kinds.__name__}: '
            "name weights of that class, or remove architectures if they are."
        )
    if spec.init_std != (json.loads(spec.config).get("initializer_range") or ModelSpec().init_std):
        config.initializer_range = spec.init_std
    config.use_cache = False
    return kinds, config


def _construct(spec: ModelSpec, attention: str | None) -> Any:
    """An instance of a subclass, with parameters on the meta device and buffers on the CPU. `attention`: the name of its implementation; None is
    the class's own choice. Returns None if the class has no such implementation, as those that choose another class by this name."""
    kind, config = _class_and_config(spec)
    hf_attention.register()
    hf_experts.register()
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own: Any = type(kind.__name__, (_Decoder, kind), body)
    own.takes_positions = "position_ids" in signature(kind.forward).parameters
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if own._can_set_experts_implementation():
        options["experts_implementation"] = NAME
    values = InitialValues()
    try:
        with _parameters_without_memory(values), values:
            model = own._from_config(config, dtype=torch.float32, **options)
    except Exception as error:  # transformers raises errors of any kind for values that do not fit together
        if attention is not None and isinstance(error, KeyError):
            return None
        raise RunError(
            f"model.config: transformers cannot build {kind.__name__} from it: {type(error).__name__}: {error}."
        ) from error
    model.initial_values = values.table(model)
    model.train()
    return model


@contextmanager
def _parameters_without_memory(values: InitialValues) -> Iterator[None]:
    """Puts parameters on the meta device as they are registered. Buffers stay on the CPU, where their values are computed."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        moved = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        values.copied(moved, parameter)
        return moved

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # torch's types forget the result
    try:
        yield
    finally:
        hook.remove()


def _keep_buffers(module: nn.Module) -> None:
    """Moves a module's buffers to the meta device, and gives it the method that sets their values again."""
    values = dict(module.named_buffers(recurse=False))
    if values:
        module.buffer_values = values  # type: ignore[assignment]  # torch's types allow tensors and modules only
        module.reset_buffers = MethodType(_reset_buffers, module)  # type: ignore[assignment]
        for name, value in values.items():
            module._buffers[name] = torch.empty_like(value, device="meta")


@torch.no_grad()
def _reset_buffers(module: Any) -> None:
    for name, value in module.buffer_values.items():
        buffer = getattr(module, name)
        if not (buffer.is_meta or is_fake(buffer)):  # dry builds and rehearsals have no memory to fill
            buffer.copy_(value)
