"""gpipe_fast::accumulate_ against a plain loop."""

import itertools

import pytest
import torch

import gpipe_fast  # noqa: F401  registers the operator

accumulate_ = torch.ops.gpipe_fast.accumulate_.default

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Sizes around one vector, one block and one chunk of the CUDA kernel.
SIZES = (1, 3, 7, 8, 9, 255, 257, 1025, 8191, 8192, 8193, 20011)


def random_pairs(sizes, accumulator_dtype, gradient_dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def random_tensor(size, dtype):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)

    accumulators = [random_tensor(size, accumulator_dtype) for size in sizes]
    return accumulators, [random_tensor(size, gradient_dtype) for size in sizes]


def check_against_loop(accumulators, gradients):
    """Checks that every accumulator equals `accumulator.add_(gradient)` bit for bit."""
    expected = [a.clone().add_(g) for a, g in zip(accumulators, gradients, strict=True)]
    unchanged = [g.clone() for g in gradients]
    versions = [a._version for a in accumulators]
    assert accumulate_(accumulators, gradients) is None
    for i, (accumulator, version) in enumerate(zip(accumulators, versions, strict=True)):
        assert torch.equal(accumulator, expected[i]), f"pair {i} of shape {tuple(accumulator.shape)}"
        assert accumulator._version > version, f"autograd does not see that accumulator {i} changed"
    for gradient, before in zip(gradients, unchanged, strict=True):
        assert torch.equal(gradient, before)


@pytest.mark.smoke
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_accumulate_equals_a_loop_bit_for_bit(dtypes, device):
    check_against_loop(*random_pairs(SIZES, *dtypes, device))


def test_empty_scalar_and_strided_tensors_are_accumulated():
    strided = [
        torch.randn(5, 6).t(),
        torch.randn(12)[::2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    gradients = [torch.randn(6, 5), torch.randn(6), torch.randn(2, 3, 4, 4)]
    check_against_loop(
        [torch.empty(0), torch.tensor(1.0), *strided], [torch.empty(0), torch.tensor(2.0), *gradients]
    )
    accumulate_([], [])


base = torch.zeros(8)


@pytest.mark.parametrize(
    ("accumulators", "gradients", "message"),
    [
        ([torch.zeros(2)], [], "1 accumulators, but 0 gradients"),
        ([torch.zeros(2, 3)], [torch.zeros(3)], r"accumulator 0 has shape \[2, 3\], but its gradient \[3\]"),
        (
            [torch.zeros(3, device="meta")],
            [torch.zeros(4, device="meta")],
            r"shape \[3\], but its gradient \[4\]",
        ),
        ([torch.zeros(2)], [torch.zeros(2, device="meta")], "accumulator 0 is on cpu, its gradient on meta"),
        (
            [torch.zeros(2).long()],
            [torch.zeros(2)],
            "dtype Float does not cast to accumulator 0 of dtype Long",
        ),
        ([base, base], [torch.ones(8), torch.ones(8)], "accumulators (0 and 1|1 and 0) share memory"),
        ([base[:5], base[4:]], [torch.ones(5), torch.ones(4)], "accumulators 0 and 1 share memory"),
        (
            [base[:4], torch.zeros(4)],
            [torch.ones(4), base[3:7]],
            "gradient 1 shares memory with accumulator 0",
        ),
        ([base], [base], "gradient 0 shares memory with accumulator 0"),
    ],
)
def test_invalid_pairs_are_refused_before_any_work(accumulators, gradients, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        accumulate_(accumulators, gradients)
    assert all(a.is_meta or not a.any() for a in accumulators)


def test_accumulate_passes_opcheck():
    accumulators, gradients = random_pairs((4, 9), torch.float32, torch.bfloat16)
    torch.library.opcheck(accumulate_, (accumulators, gradients))


@pytest.mark.cuda
def test_cuda_many_small_tensors_of_mixed_dtypes_are_accumulated():
    """Adds more pairs than one launch's table holds, of mixed dtypes, some of them empty."""
    accumulators, gradients = [], []
    for accumulator_dtype, gradient_dtype in itertools.product(DTYPES[:3], DTYPES[:3]):
        new_pairs = random_pairs([i % 37 for i in range(300)], accumulator_dtype, gradient_dtype, "cuda")
        accumulators += new_pairs[0]
        gradients += new_pairs[1]
    order = torch.randperm(len(accumulators), generator=torch.Generator().manual_seed(1)).tolist()
    check_against_loop([accumulators[i] for i in order], [gradients[i] for i in order])


@pytest.mark.cuda
@pytest.mark.parametrize("shift", [1, 2, 3, 5])
def test_cuda_unaligned_and_strided_tensors_are_accumulated(shift):
    (accumulator,), (gradient,) = random_pairs([10_000], torch.float32, torch.bfloat16, "cuda")
    (matrix,), (transposed,) = random_pairs([(33, 65)], torch.float32, torch.float32, "cuda")
    check_against_loop(
        [accumulator[shift:9000], matrix],
        [gradient[2 * shift : 9000 + shift], transposed.t().contiguous().t()],
    )
    # The elements before and after the views are unchanged.
    (untouched,), _ = random_pairs([10_000], torch.float32, torch.bfloat16, "cuda")
    assert torch.equal(accumulator[:shift], untouched[:shift])
    assert torch.equal(accumulator[9000:], untouched[9000:])
