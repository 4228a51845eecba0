"""Models by name: parameters and arithmetic against published figures, strides, and that each of them trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from drawbar.config import Optimizer, Recipe, load_recipe
from drawbar.errors import InputError
from drawbar.model_commands import complete_name, lines
from drawbar.models.build import build_model, check_takes
from drawbar.models.figures import figures_of
from drawbar.models.names import MODEL_NAMES, find_model
from drawbar.train.batch import HostBatch
from drawbar.train.clock import HostClock
from drawbar.train.objective import Classification
from drawbar.train.optimizer import build_optimizer
from drawbar.train.precision import Precision
from drawbar.train.step import TrainStep
from tests.drawbar_process import drawbar

DOCS = Path(__file__).parent.parent / "docs"


def parameters_of(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(name, 1000).parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    # torchvision's documentation (`num_params` of its weights), but for the two whose auxiliary heads it counts in.
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet50_v1.5", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet101_v1.5", 44_549_160),
        ("resnet152", 60_192_808),
        ("resnet152_v1.5", 60_192_808),
        ("vgg11", 132_863_336),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("googlenet", 6_624_904),
        ("inception3", 27_161_264 - 3_326_696),
        ("alexnet", 61_100_840),
        ("mobilenet", 3_504_872),
        ("densenet", 7_978_856),
        ("densenet121", 7_978_856),
        ("densenet161", 28_681_000),
        ("densenet169", 14_149_480),
        ("densenet201", 20_013_928),
    ],
)
def test_parameters_are_the_published_number(name: str, published: int) -> None:
    assert parameters_of(name) == published


@pytest.mark.parametrize(
    ("name", "millions"),
    # timm's table of results.
    [("inception4", 42.68), ("resnet50_v2", 25.55), ("resnet101_v2", 44.54), ("resnet152_v2", 60.19)],
)
def test_parameters_of_timms_networks_are_the_published_number(name: str, millions: float) -> None:
    assert round(parameters_of(name) / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("name", "giga_multiply_adds"),
    # torchvision's documentation (`GFLOPS` of its weights, which count a multiplication and an addition as one).
    [
        ("resnet50_v1.5", 4.09),
        ("resnet152_v1.5", 11.51),
        ("vgg16", 15.47),
        ("googlenet", 1.50),
        ("inception3", 5.71),
        ("mobilenet", 0.30),
        ("densenet121", 2.83),
    ],
)
def test_forward_arithmetic_is_the_published_number(name: str, giga_multiply_adds: float) -> None:
    assert round(figures_of(name).forward_flops / 2e9, 2) == pytest.approx(giga_multiply_adds, abs=0.011)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet"])
def test_backward_is_twice_forward_but_for_the_first_layer(name: str) -> None:
    """Also where convolutions have groups. The first layer needs no gradient of the image."""
    figures = figures_of(name)
    with torch.device("meta"):
        first = next(m for m in build_model(name, 1000).modules() if isinstance(m, nn.Conv2d))
    side = figures.image_size // 2
    first_flops = 2 * side * side * first.weight.numel()
    assert figures.forward_backward_flops == 3 * figures.forward_flops - first_flops


def test_v1_takes_less_arithmetic_than_v1_5() -> None:
    assert figures_of("resnet50").forward_flops < figures_of("resnet50_v1.5").forward_flops


def bottleneck_strides(name: str) -> list[tuple[int, int]]:
    """(first 1x1, 3x3) of the blocks that halve the image."""
    with torch.device("meta"):
        blocks = [m for m in build_model(name, 10).modules() if hasattr(m, "conv3")]
    strides = [(int(b.conv1.stride[0]), int(b.conv2.stride[0])) for b in blocks]  # type: ignore[index]
    return [pair for pair in strides if pair != (1, 1)]


@pytest.mark.parametrize("depth", [50, 101, 152])
def test_versions_of_resnet_differ_in_where_the_stride_is(depth: int) -> None:
    assert bottleneck_strides(f"resnet{depth}") == [(2, 1)] * 3
    assert bottleneck_strides(f"resnet{depth}_v1.5") == [(1, 2)] * 3
    assert bottleneck_strides(f"resnet{depth}_v2") == [(2, 1)] * 3


def test_v2_is_pre_activation() -> None:
    """Batch norm and ReLU before a block's first convolution, and once more after the last block."""
    model = build_model("resnet50_v2", 10)
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model.eval()(torch.zeros(1, 3, 32, 32))
    in_last_block = [name.rpartition(".")[2] for name in calls if name.startswith("stages.3.blocks.2")]
    assert in_last_block == ["norm1", "conv1", "norm2", "conv2", "norm3", "conv3"]
    assert calls[-2:] == ["norm", "head.fc"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 32),
        ("resnet50", 32),
        ("resnet50_v2", 32),
        ("vgg11", 32),
        ("googlenet", 64),
        ("inception3", 96),
        ("inception4", 96),
        ("alexnet", 64),
        ("mobilenet", 32),
        ("densenet", 32),
        ("trivial", 8),
        ("torchvision:squeezenet1_1", 64),
        ("torchvision:inception_v3", 96),
        ("timm:efficientnet_b0", 32),
        ("timm:vit_tiny_patch16_224", 224),
    ],
)
def test_each_family_trains(name: str, size: int) -> None:
    """One step by the product's own step: a finite loss, a gradient for every weight, and weights that moved."""
    torch.manual_seed(0)
    model = build_model(name, 10)
    optimizer = build_optimizer(model, Optimizer())
    gradients: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(sum(parameter.grad is not None for parameter in model.parameters()))
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    device, dtype = torch.device("cpu"), torch.float32
    objective = Classification(device=device, dtype=dtype, channels_last=True)
    precision, clock = Precision("fp32"), HostClock()
    step = TrainStep(model, optimizer, objective, lambda step: 0.01, clock=clock, device=device, precision=precision)
    pixels = torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8)
    trained = step.run(HostBatch(pixels=pixels, labels=torch.tensor([1, 2]), epoch=0, release=lambda: None))
    assert trained.loss is not None
    assert torch.isfinite(trained.loss)
    assert gradients == [len(before)]
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


# Names


def test_a_recipe_takes_the_models_own_size_unless_it_has_one() -> None:
    assert Recipe().input.image_size == 224
    for name, size in (("inception3", 299), ("inception4", 299), ("alexnet", 227), ("timm:anything", 224)):
        assert Recipe.model_validate({"model": {"name": name}}).input.image_size == size
    assert Recipe.model_validate({"model": {"name": "alexnet"}, "input": {"image_size": 64}}).input.image_size == 64


def test_the_dump_holds_the_size(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\nname = "inception3"\n')
    recipe = load_recipe(path)
    assert "image_size = 299" in recipe.to_toml()
    path.write_text(recipe.to_toml())
    assert load_recipe(path) == recipe


@pytest.mark.parametrize("name", ["timm:", "timm:../x", "timm:hf-hub:a/b", "tv:resnet50", "ResNet50", ""])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown model"):
        find_model(name)


def test_a_name_is_refused_without_torch() -> None:
    code = (
        "import sys\nfrom drawbar.config import Optimizer, Recipe\n"
        "try: Recipe.model_validate({'model': {'name': 'resnet5'}})\n"
        "except ValueError: print({'torch', 'torchvision', 'timm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:resnet5o", "timm has no network 'resnet5o'; did you mean timm:"),
        ("torchvision:resnet5o", "torchvision has no image classifier 'resnet5o'; did you mean torchvision:resnet50?"),
        ("torchvision:fasterrcnn_resnet50_fpn", "torchvision has no image classifier"),
    ],
)
def test_a_network_that_its_library_lacks_is_named(name: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        build_model(name, 10)
    assert words in caught.value.message


@pytest.mark.parametrize(("name", "size"), [("alexnet", 32), ("inception3", 64), ("timm:vit_tiny_patch16_224", 96)])
def test_images_that_a_model_cannot_take_are_refused_in_one_line(name: str, size: int) -> None:
    with pytest.raises(InputError, match=f"cannot take images of {size} pixels") as caught:
        check_takes(name, 10, size)
    assert "\n" not in caught.value.message
    check_takes(name, 10, 224)


def test_a_network_without_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drawbar.models.build.build_model", lambda name, num_classes: nn.Identity())
    with pytest.raises(InputError, match="is no classifier"):
        check_takes("timm:some_feature_extractor", 10, 64)


@pytest.mark.run
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.name=timm:resnet5o"], "timm has no network 'resnet5o'"),
        (["model.name=alexnet", "input.image_size=32"], "model alexnet cannot take images of 32 pixels"),
    ],
)
def test_a_run_says_so_and_ends_with_the_code_of_wrong_input(tmp_path: Path, settings: list[str], words: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[input]\nsource = "constant"\n[train]\nbatch_size = 2\n')
    changes = [word for setting in settings for word in ("--set", setting)]
    finished = drawbar("run", recipe, *changes, "--out", tmp_path / "run")
    assert finished.code == 2
    assert words in finished.error_line


# The command


def test_models_prints_json_that_adds_up() -> None:
    finished = drawbar("models", "resnet50", "timm:efficientnet_b0", "--json")
    rows = json.loads(finished.stdout)
    assert [row["name"] for row in rows] == ["resnet50", "timm:efficientnet_b0"]
    for row in rows:
        assert row["gradient_bytes_fp32"] == 4 * row["parameters"] == 2 * row["gradient_bytes_fp16"]


def test_models_refuses_a_wrong_name_before_it_counts_any() -> None:
    finished = drawbar("models", "resnet50", "resnet5")
    assert (finished.code, finished.stdout) == (2, "")
    assert "did you mean 'resnet50'?" in finished.error_line


def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    text = (DOCS / "models.md").read_text()
    width = max(len(name) for name in MODEL_NAMES)
    for line in lines((figures_of(name) for name in MODEL_NAMES), width):
        assert f"    {line}".rstrip() in text.splitlines()


def test_names_are_completed() -> None:
    assert set(complete_name("")) == set(MODEL_NAMES)
    request = {"_DRAWBAR_COMPLETE": "complete_bash", "COMP_WORDS": "drawbar models resnet50", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['drawbar']; from drawbar.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **request}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["resnet50", "resnet50_v1.5", "resnet50_v2"]
