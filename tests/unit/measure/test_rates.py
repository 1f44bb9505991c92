import pytest
import torch

from halfstep.measure import rates
from halfstep.measure.dtypes import Arithmetic, Support, dtype_support
from halfstep.measure.rates import float32_products, matmul_rate, matmul_rates

CPU = torch.device("cpu")
CUDA_PRODUCTS = torch.backends.cuda.matmul


@pytest.fixture(scope="module")
def measured() -> dict[Arithmetic, rates.Measured]:
    return matmul_rates(CPU, budget_s=0.05)


def test_every_format_the_device_has_is_measured(measured: dict[Arithmetic, rates.Measured]) -> None:
    has = {name for name, told in dtype_support(CPU).items() if told.support is not Support.ABSENT}
    assert set(measured) == has >= {Arithmetic.FP32, Arithmetic.BF16}


def test_rates_are_positive_with_unit_count_and_spread(measured: dict[Arithmetic, rates.Measured]) -> None:
    for rate in measured.values():
        assert 0 < rate.low <= rate.value <= rate.high
        assert (rate.unit, rate.count >= 3) == ("TFLOP/s", True)


def test_measuring_leaves_the_random_state_bitwise_untouched() -> None:
    before = torch.get_rng_state()
    matmul_rate(CPU, Arithmetic.FP32, budget_s=0.01)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_side_that_does_not_fit_stops_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = rates._product

    def out_of_memory(device: torch.device, arithmetic: Arithmetic, side: int) -> rates.Work:
        if side > 2 * rates.SMALLEST_SIDE:
            raise torch.OutOfMemoryError("full")
        return fits(device, arithmetic, side)

    monkeypatch.setattr(rates, "_product", out_of_memory)
    assert rates._largest_side(CPU, Arithmetic.FP32, 1e9, rates.elapsed_s)[0] == 2 * rates.SMALLEST_SIDE


def test_a_format_without_a_product_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, arithmetic: Arithmetic, *, budget_s: float) -> rates.Measured:
        raise RuntimeError('"addmm" not implemented')

    monkeypatch.setattr(rates, "matmul_rate", refuse)
    assert rates.matmul_rates(CPU) == {}


@pytest.mark.parametrize(("exact", "inside"), [(True, "ieee"), (False, "tf32")])
def test_fp32_products_of_a_gpu_are_exact_or_tf32_inside_and_as_before_afterwards(exact: bool, inside: str) -> None:
    if not hasattr(CUDA_PRODUCTS, "fp32_precision"):
        pytest.skip("torch before 2.9 has only a flag")

    def break_inside() -> None:
        with float32_products(exact=exact, device=torch.device("cuda")):
            assert CUDA_PRODUCTS.fp32_precision == inside
            raise RuntimeError("broken")

    before = CUDA_PRODUCTS.fp32_precision
    with pytest.raises(RuntimeError, match="broken"):
        break_inside()
    assert CUDA_PRODUCTS.fp32_precision == before


def test_older_torch_is_set_through_its_flag() -> None:
    class Flag:
        allow_tf32 = False

    settings = Flag()
    with rates._set_products(settings, exact=False):
        assert settings.allow_tf32 is True
    assert settings.allow_tf32 is False


def test_fp32_products_of_the_cpu_are_left_as_the_process_set_them() -> None:
    before = torch.get_float32_matmul_precision()
    with float32_products(exact=True, device=CPU):
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_format_of_a_gpu_is_measured() -> None:
    device = torch.device("cuda", 0)
    assert {Arithmetic.FP32, Arithmetic.FP16} <= set(matmul_rates(device, budget_s=0.1))
