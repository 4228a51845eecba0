"""From tf_cnn_benchmarks' flags to a recipe: a pure function of the command line and the environment.

What the command line leaves out gets tf_cnn_benchmarks' default, not Drawbar's, where the two differ and it matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drawbar.config import Recipe, recipe_from_tree
from drawbar.errors import InputError
from drawbar.storage.environment import is_on
from drawbar.tf_cnn.flags import Given, Value, parse
from drawbar.tf_cnn.keys import has_counterpart
from drawbar.tf_cnn.table import MODEL_BATCH_SIZE, TABLE, Always, Choice, Key

ECS_HTTP_PORT, ECS_HTTPS_PORT = 9020, 9021
"""Of ECS's S3 service."""
SHARD_PATTERN = "train-*-of-*"
"""What tf_cnn_benchmarks trains on below its `--data_dir`."""


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one flag, or of one that was not given."""

    flag: str
    """As it was spelled; empty: tf_cnn_benchmarks' default."""
    key: str
    """Of the recipe; empty: the flag asks for what is always so."""
    value: Any
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Translation:
    recipe: Recipe
    lines: list[Line]
    ignored: list[str]
    """Flags without a counterpart, as they were spelled."""


def translate(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    ignore_unknown: bool = False,
    overrides: Sequence[str] = (),
) -> Translation:
    """`overrides` are `section.key=value`, as for `drawbar run`, and have the last word.

    Raises InputError naming all flags that have no counterpart (unless they are to be ignored), and all that ask for
    something else than Drawbar does; RecipeError for a value that no recipe may have.
    """
    given = parse(arguments, {name: entry.kind for name, entry in TABLE.items()})
    work = _Work(given, environ)
    work.translate()
    complaints = []
    if work.refused:
        complaints.append(f"Drawbar does not do {', '.join(work.refused)}")
    if work.unknown and not ignore_unknown:
        complaints.append(f"no counterpart in Drawbar: {', '.join(work.unknown)}")
    if complaints:
        hint = "--ignore-unknown goes on without those that have no counterpart" if work.unknown else None
        raise InputError("; ".join(complaints), hint=None if ignore_unknown else hint)
    recipe = recipe_from_tree(work.tree, overrides)
    return Translation(recipe=recipe, lines=work.lines, ignored=work.unknown)


@dataclass
class _Work:
    given: list[Given]
    environ: Mapping[str, str]
    tree: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """What would be another job: left out, the number would be that of something else. With the reason."""

    def translate(self) -> None:
        for flag in self._last_of_each():
            entry = TABLE.get(flag.name)
            if isinstance(entry, Key):
                self._set(flag, entry.key, flag.value)
            elif isinstance(entry, Choice):
                if flag.value in entry.values:
                    self._set(flag, entry.key, entry.values[flag.value])
                else:
                    self._refuse(flag, f"known: {', '.join(str(value) for value in entry.values)}")
            elif isinstance(entry, Always):
                self._always(flag, entry)
            elif entry is None:
                self.unknown.append(flag.text)
        self._model_and_batch()
        self._data()
        self._optimizer()
        self._exchange()
        self._default("model.precision", "fp32")
        self._default("model.channels_last", False, "NCHW")
        self._default("optimizer.weight_decay", 4e-5)
        self._default("summaries.every_steps", 0)
        self._default("optimizer.no_decay", [], "all weights decay")

    def _last_of_each(self) -> list[Given]:
        """As absl has it: a flag that is given again replaces the first."""
        return list({flag.name: flag for flag in self.given}.values())

    def _value(self, name: str) -> tuple[Given | None, Value | None]:
        flag = next((flag for flag in self._last_of_each() if flag.name == name), None)
        return flag, flag.value if flag else None

    def _set(self, flag: Given, key: str, value: Any, words: str = "") -> None:
        if not has_counterpart(key, value):
            self._refuse(flag, f"recipes have no {key} = {value}")
            return
        self._put(key, value)
        self.lines.append(Line(flag.text, key, value, words))

    def _default(self, key: str, value: Any, words: str = "") -> None:
        section, _, name = key.partition(".")
        if name not in self.tree.get(section, {}):
            self._put(key, value)
            self.lines.append(Line("", key, value, words))

    def _put(self, key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        self.tree.setdefault(section, {})[name] = value

    def _always(self, flag: Given, entry: Always) -> None:
        if flag.value in entry.values:
            self._is_so(flag, entry.words)
        elif entry.tuning:
            self.unknown.append(flag.text)
        else:
            self._refuse(flag, entry.words)

    def _is_so(self, flag: Given, words: str) -> None:
        self.lines.append(Line(flag.text, "", None, words))

    def _refuse(self, flag: Given, words: str) -> None:
        self.refused.append(f"{flag.text} ({words})")

    def _model_and_batch(self) -> None:
        self._default("model.name", "trivial")
        name = self.tree["model"]["name"]
        self.tree["name"] = "tf-cnn-" + name.replace(":", "-")
        flag, batch_size = self._value("batch_size")
        if flag and batch_size:
            self._set(flag, "train.batch_size", batch_size)
        else:
            words = "the model's own"
            value = MODEL_BATCH_SIZE.get(name, 32)
            self._put("train.batch_size", value)
            self.lines.append(Line(flag.text if flag else "", "train.batch_size", value, words))
        if self._value("num_batches")[0] and self._value("num_epochs")[0]:
            raise InputError("--num_batches and --num_epochs cannot both be given")

    def _data(self) -> None:
        flag, data_dir = self._value("data_dir")
        nodes = [flag for flag in self.given if flag.name == "ecs_node"]
        if flag is None or not data_dir:
            if nodes:
                raise InputError("--ecs_node needs a --data_dir", hint="--data_dir=s3://imagenet/train")
            self._put("input.source", "constant")
            self.lines.append(Line("", "input.source", "constant", "synthetic data, as without --data_dir"))
            return
        self._set(flag, "data.url", f"{str(data_dir).rstrip('/')}/{SHARD_PATTERN}")
        self._default("input.crop_boxes", "objects")
        addresses = [text for node in nodes for text in str(node.value).split(",")]
        if addresses:
            endpoints = [ecs_address(address, self.environ) for address in addresses]
            spelled = " ".join(node.text for node in nodes)
            self._put("storage.endpoints", endpoints)
            self.lines.append(Line(spelled, "storage.endpoints", endpoints))
            self._default("storage.policy", "rank", "rank r modulo their number, as round_robin_ecs.py")
        elif str(data_dir).startswith("s3://"):
            self._default("storage.endpoints", "environment")

    def _optimizer(self) -> None:
        flag, name = self._value("optimizer")
        momentum_flag, momentum = self._value("momentum")
        if flag and name not in ("sgd", "momentum"):
            self._refuse(flag, "known: sgd, momentum")
        key = "optimizer.momentum"
        value = (0.9 if momentum is None else momentum) if name == "momentum" else 0.0
        words = "" if name == "momentum" else "optimizer sgd is without momentum"
        self._put(key, value)
        self.lines.append(Line(" ".join(each.text for each in (flag, momentum_flag) if each), key, value, words))
        key = "optimizer.learning_rate"
        if self._value("init_learning_rate")[0] is None:
            if not self.tree["model"]["name"].startswith("resnet"):
                self._default(key, 0.005)
            else:
                words = "tf_cnn_benchmarks has a schedule over 90 epochs here; no step takes longer or shorter by it"
                self._default(key, 0.01, words)

    def _exchange(self) -> None:
        ranks = self.tree.get("launch", {}).get("ranks", 1)
        flag, update = self._value("variable_update")
        if flag:
            summed = update in ("horovod", "replicated")
            words = "gradients are averaged over all ranks in each step"
            if summed:
                self._is_so(flag, words)
            elif ranks == 1 and update in ("parameter_server", "independent"):
                self._is_so(flag, "one rank exchanges nothing")
            else:
                self._refuse(flag, f"{words}: horovod, replicated")
        flag, device = self._value("horovod_device")
        if flag:
            other = self._value("device")[1]
            words = "gradients are exchanged where they are computed"
            if device in ("", "cpu", "gpu") and (not device or device == str(other or device).lower()):
                self._is_so(flag, words)
            else:
                self._refuse(flag, words)


def ecs_address(node: str, environ: Mapping[str, str]) -> str:
    """`10.1.2.1` to `https://10.1.2.1:9021`, or to `http://10.1.2.1:9020` where S3_USE_HTTPS begins with 0."""
    if "://" in node:
        return node.rstrip("/")
    secure = is_on(environ, "S3_USE_HTTPS")
    has_port = ":" in node.rpartition("]")[2]
    port = "" if has_port else f":{ECS_HTTPS_PORT if secure else ECS_HTTP_PORT}"
    return f"{'https' if secure else 'http'}://{node}{port}"
