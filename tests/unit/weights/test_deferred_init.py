from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from weights_kit import assert_same_bits, deferred, source, tensors_of

import roost
from roost.errors import DeferredInitError, MissingWeightsError
from roost.weights.deferred import origin_of
from roost.weights.source import source_of

Initialiser = Callable[[torch.Tensor], object]
INITIALISERS: dict[str, Initialiser] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "constant": lambda w: nn.init.constant_(w, 3.0),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "trunc_normal_tight": lambda w: nn.init.trunc_normal_(w, std=1.0, a=-0.5, b=0.5),
    "trunc_normal_far": lambda w: nn.init.trunc_normal_(w, std=1.0, a=1.0, b=1.2),
    "orthogonal": nn.init.orthogonal_,
    "orthogonal_gain": lambda w: nn.init.orthogonal_(w, gain=2.0),
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "exponential": lambda w: w.data.exponential_(),
    "bernoulli": lambda w: w.data.bernoulli_(0.3),
    "random": lambda w: w.data.random_(0, 7),
    "permuted": lambda w: w.data.copy_(torch.randperm(w.numel()).view_as(w)),
    "multinomial": lambda w: w.data.copy_(torch.multinomial(torch.rand(w.numel()), w.numel(), True).view_as(w)),
    "poisson": lambda w: w.data.copy_(torch.poisson(torch.rand(w.shape) * 5)),
    "randn_like": lambda w: w.data.copy_(torch.randn_like(w)),
    "dropout": lambda w: w.data.copy_(nn.functional.dropout(torch.ones(w.shape), 0.4)),
    "transposed": lambda w: w.data.t().normal_(),
    "strided": lambda w: w.data.zero_()[::2].normal_(),
    "clamped": lambda w: w.data.normal_().clamp_(-1, 1),
    "masked": lambda w: w.data.zero_().masked_fill_(torch.rand(w.shape) < 0.5, 9.0),
    "indexed": lambda w: w.data.zero_().__setitem__(torch.rand(w.shape[0]) < 0.5, 1.0),
    "chosen": lambda w: w.data.normal_().index_fill_(0, (torch.rand(w.shape[0]) < 0.5).nonzero().flatten(), 2.0),
    "decided": lambda w: w.data.normal_() if torch.rand(()) < 0.5 else w.data.uniform_(),
}


class OneWeight(nn.Module):
    def __init__(self, initialise: Initialiser, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.before = nn.Linear(3, 5)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            initialise(self.weight)
        self.after = nn.Linear(5, 3)


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize("shape", [(13, 31), (32, 16), (3, 4)], ids=str)
def test_every_initialiser_gives_the_bits_of_an_eager_build(name: str, shape: tuple[int, int]) -> None:
    assert_same_bits(lambda: OneWeight(INITIALISERS[name], shape, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["uniform", "normal", "kaiming_uniform", "trunc_normal", "exponential", "transposed"])
@pytest.mark.parametrize("shape", [(13, 31), (32, 16), (3, 4)], ids=str)
def test_other_dtypes_give_the_bits_of_an_eager_build(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    assert_same_bits(lambda: OneWeight(INITIALISERS[name], shape, dtype))


class ManyKinds(nn.Module):
    """What people write in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, padding_idx=2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.recurrent = nn.LSTM(5, 6, 2, bidirectional=True)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2)
        self.reduced = nn.Conv2d(3, 4, 3).to(torch.bfloat16)
        self.on_cpu = nn.Linear(4, 4).to("cpu").cpu()
        self.explicit = nn.Linear(4, 4, device="cpu")
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
        self.legacy = nn.Parameter(torch.Tensor(3, 7))
        nn.init.orthogonal_(self.legacy)
        self.drawn = nn.Parameter(torch.randn(40, 50) * 0.02)
        self.normal = nn.Parameter(torch.normal(0.0, 1.0, (7, 7)))
        self.scaled = nn.Parameter(torch.full((5,), 1e-4))
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.copied = copy.deepcopy(self.explicit)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.source, self.target = nn.Linear(4, 4), nn.Linear(4, 4)
        self.target.load_state_dict(self.source.state_dict())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.listed = torch.arange(4).tolist()
        self.register_buffer("random", torch.randn(5, 5))
        self.register_buffer("inverse", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("complex", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("table", torch.from_numpy(torch.linspace(0, 1, 4).numpy()))


@pytest.mark.parametrize("order", range(3))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_what_people_write_in_constructors_gives_the_bits_of_an_eager_build(order: int) -> None:
    assert_same_bits(ManyKinds, seed=order, order=order)
    eager, model = ManyKinds(), deferred(ManyKinds)
    assert model.rates == eager.rates and model.listed == eager.listed
    assert model.head.weight is model.embedding.weight


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(17, 33),
    lambda: nn.Linear(3, 2),
    lambda: nn.Conv2d(3, 5, 3),
    lambda: nn.Embedding(11, 13, padding_idx=1),
    lambda: nn.GRU(4, 5),
    lambda: nn.BatchNorm1d(6),
    lambda: nn.Linear(64, 64).to(torch.bfloat16),
    lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 4)).double(),
    lambda: OneWeight(INITIALISERS["trunc_normal_tight"], (9, 20), torch.float32),
    lambda: OneWeight(INITIALISERS["orthogonal"], (9, 20), torch.float32),
    lambda: OneWeight(INITIALISERS["poisson"], (9, 20), torch.float32),
]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(LAYERS) - 1), min_size=1, max_size=8), st.integers(0, 2**63 - 1), st.integers(0, 99))
def test_any_model_asked_for_in_any_order_has_the_bits_of_an_eager_build(kinds: list[int], seed: int, order: int) -> None:
    assert_same_bits(lambda: nn.ModuleList([LAYERS[kind]() for kind in kinds]), seed=seed, order=order)


def test_a_tensor_far_behind_millions_of_draws_has_the_bits_of_an_eager_build() -> None:
    assert_same_bits(lambda: nn.Sequential(*(nn.Linear(3001, 2003) for _ in range(4))), order=3)


def test_a_default_dtype_is_part_of_the_record() -> None:
    def make() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = nn.Linear(5, 7)
            model.register_buffer("rates", torch.arange(5) / 7)
            model.scale = nn.Parameter(torch.arange(5) / 7)
        finally:
            torch.set_default_dtype(torch.float32)
        return model

    assert_same_bits(make)
    assert deferred(make).scale.dtype is torch.bfloat16


def test_seeding_inside_the_block_counts() -> None:
    def make() -> nn.Module:
        first = nn.Linear(3, 3)
        torch.manual_seed(7)
        second = nn.Linear(3, 3)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            third = nn.Linear(3, 3)
        state = torch.get_rng_state()
        fourth = nn.Linear(3, 3)
        torch.set_rng_state(state)
        return nn.Sequential(first, second, third, fourth, nn.Linear(3, 3))

    assert_same_bits(make)


def test_a_seed_of_the_block_is_that_of_manual_seed() -> None:
    torch.manual_seed(11)
    wanted = nn.Linear(4, 5)
    torch.manual_seed(3)
    with roost.deferred_init(seed=11):
        model = nn.Linear(4, 5)
    assert torch.equal(source(model).read(["weight"])["weight"], wanted.weight)


def test_the_global_generator_is_as_it_was_after_the_block_and_after_reading() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with roost.deferred_init():
        model = nn.Sequential(nn.Linear(40, 50), nn.Dropout(0.5), OneWeight(INITIALISERS["dropout"], (4, 5), torch.float32))
    assert torch.equal(torch.get_rng_state(), before)
    source(model).read(list(tensors_of(model)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_is_as_it_was_when_the_block_fails() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), roost.deferred_init():
        nn.Linear(4, 4)
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.Linear(4, 4).weight.device.type == "cpu"


def test_several_threads_may_read_at_once() -> None:
    torch.manual_seed(0)
    wanted = tensors_of(nn.Sequential(*(nn.Linear(60, 61) for _ in range(12))))
    model = deferred(lambda: nn.Sequential(*(nn.Linear(60, 61) for _ in range(12))))
    found = source(model)
    with ThreadPoolExecutor(4) as pool:
        for name, made in zip(wanted, pool.map(lambda name: found.read([name])[name], wanted), strict=True):
            assert torch.equal(made, wanted[name])


def test_a_buffer_of_two_modules_stays_one_tensor() -> None:
    class Owner(nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table)
            self.plain = table

    def make() -> nn.Module:
        table = torch.arange(6.0)
        return nn.Sequential(Owner(table), Owner(table))

    model = deferred(make)
    assert model[0].table is model[1].table is model[0].plain
    assert model[0].table.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tensor_attribute_is_real_after_the_block() -> None:
    def make() -> nn.Module:
        model = nn.Linear(2, 2)
        model.scale = torch.sqrt(torch.ones(3) * 4)
        return model

    assert deferred(make).scale.tolist() == [2, 2, 2]


def test_data_that_changes_later_is_recorded_as_it_was() -> None:
    data = torch.tensor([1.0, 2.0])
    with roost.deferred_init():
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(2) + data)
        data.zero_()
    data.fill_(9)
    assert source(model).read(["weight"])["weight"].tolist() == [1, 2]


def test_drawing_into_real_data_inside_the_block_follows_the_same_numbers() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3))
        given = torch.tensor([0.0, 0.0, 0.0])
        given.normal_()
        model.given = nn.Parameter(given)
        model.append(nn.Linear(3, 3))
        return model

    assert_same_bits(make)


def test_a_generator_of_its_own_is_refused_with_the_line() -> None:
    with pytest.raises(DeferredInitError, match=r"test_deferred_init.py:\d+: nn.init.normal_\(torch.empty"), roost.deferred_init():
        nn.init.normal_(torch.empty(3), generator=torch.Generator())


def test_the_default_generator_may_be_named() -> None:
    assert_same_bits(lambda: OneWeight(lambda w: w.data.normal_(generator=torch.default_generator), (4, 5), torch.float32))


def test_a_block_inside_a_block_is_refused() -> None:
    with roost.deferred_init(), pytest.raises(DeferredInitError, match="another block"), roost.deferred_init():
        nn.Linear(2, 2)


def test_a_meta_tensor_from_outside_is_refused() -> None:
    outside = torch.empty(3, device="meta")
    with roost.deferred_init(), pytest.raises(DeferredInitError, match="not made in this block"):
        outside + torch.ones(3)


def test_a_buffer_that_is_part_of_a_parameter_is_refused() -> None:
    def make() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("row", model.weight.detach()[0])
        return model

    with pytest.raises(DeferredInitError, match="'row' shares its memory"):
        deferred(make)


def test_a_resized_tensor_is_refused() -> None:
    with roost.deferred_init(), pytest.raises(DeferredInitError, match="changes the size"):
        torch.ones(3).resize_(30)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.half(), lambda model: copy.deepcopy(model), lambda model: nn.init.zeros_(model.weight)],
    ids=["converted", "copied", "initialised"],
)
def test_a_parameter_changed_after_the_block_is_an_error(change: Callable[[nn.Module], object]) -> None:
    model = deferred(lambda: nn.Linear(3, 3))
    changed = change(model)
    with torch.no_grad():
        checked = changed if isinstance(changed, nn.Module) else model
    with pytest.raises(MissingWeightsError, match="weight"):
        source(checked)


def test_a_meta_model_without_a_record_is_an_error() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(MissingWeightsError, match="deferred"):
        source(model)


def test_other_threads_build_real_models_meanwhile() -> None:
    built: list[nn.Module] = []
    with roost.deferred_init():
        thread = threading.Thread(target=lambda: built.append(nn.Embedding(3, 3, _weight=torch.ones(3, 3))))
        thread.start()
        thread.join()
    assert built[0].weight.device.type == "cpu"


def test_a_detached_parameter_still_has_its_origin() -> None:
    model = deferred(lambda: nn.Linear(3, 3))
    assert origin_of(model.weight.detach()) is not None
    held = {name: item.detach() for name, item in model.named_parameters()}
    assert source_of(model, held).read(["bias"])["bias"].shape == (3,)


def test_a_record_lives_as_long_as_a_module_of_its_block() -> None:
    model = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    last = model[1]
    del model
    assert source(last).read(["weight"])["weight"].shape == (3, 3)
