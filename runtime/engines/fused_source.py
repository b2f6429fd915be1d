"""CUDA kernels of fused operators, from their descriptions in the manifest.

A kernel computes all steps of a row in registers, in single precision, so it reads each input once and writes one
output, all in half precision. Threads hold vectors of 8 numbers of a row: up to 32 threads a row, with several rows in
a block, or a block a row. The C library has the same struct of arguments (collectives/native/fused_operators.c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from splitc.runtime.package.fused import INPUTS, WIDTH, Fused, FusedStep, Half

# Threads of a warp, of a block with several rows, and the most of a block with one row. A choice: other numbers were
# not measured.
WARP, SEVERAL, MOST = 32, 256, 256
# CUDA's types of one number and of two, and what converts them.
HALVES: Mapping[Half, tuple[str, str]] = {
    "float16": ("__half", "__half2"),
    "bfloat16": ("__nv_bfloat16", "__nv_bfloat162"),
}
CONVERSIONS: Mapping[Half, str] = {
    "float16": """
#include <cuda_fp16.h>
__device__ float as_float(__half x) { return __half2float(x); }
__device__ float2 as_floats(__half2 both) { return __half22float2(both); }
__device__ void as_pair(__half2& to, float x, float y) { to = __floats2half2_rn(x, y); }
""",
    "bfloat16": """
#include <cuda_bf16.h>
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float2 as_floats(__nv_bfloat162 both) { return __bfloat1622float2(both); }
__device__ void as_pair(__nv_bfloat162& to, float x, float y) { to = __floats2bfloat162_rn(x, y); }
""",
}
HEAD = """
struct Arguments { const void* in[INPUTS]; unsigned count[INPUTS]; void* out; unsigned rows, sequence; };

// Vectors of numbers, of which two are a Pair.
template <typename Pair, int pairs>
struct alignas(4 * pairs) Vector { Pair at[pairs]; };

template <typename Pair, int pairs = WIDTH / 2>
__device__ void load(float* to, const void* from, size_t place) {
    const Vector<Pair, pairs> vector = *(const Vector<Pair, pairs>*)((const Pair*)from + place / 2);
    for (int pair = 0; pair < pairs; ++pair) {
        const float2 both = as_floats(vector.at[pair]);
        to[2 * pair] = both.x, to[2 * pair + 1] = both.y;
    }
}

template <typename Pair>
__device__ void store(void* to, size_t place, const float* from) {
    Vector<Pair, WIDTH / 2> vector;
    for (int pair = 0; pair < WIDTH / 2; ++pair) as_pair(vector.at[pair], from[2 * pair], from[2 * pair + 1]);
    *(Vector<Pair, WIDTH / 2>*)((Pair*)to + place / 2) = vector;
}

// The sum over all threads of a row. With more than a warp, a block has one row.
template <int threads>
__device__ float sum(float part) {
    for (int away = (threads < 32 ? threads : 32) / 2; away; away /= 2) part += __shfl_xor_sync(~0u, part, away);
    if (threads <= 32) return part;
    __shared__ float parts[threads / 32 + 1];
    __syncthreads();  // all have read the sum before
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
    __syncthreads();
    part = 0;
    for (int warp = 0; warp < threads / 32; ++warp) part += parts[warp];
    return part;
}

// The row of a rotary embedding's tables for a token: there is an id for each, or that of each sequence's first one.
__device__ long long position(const Arguments& given, int input, int cosines, int sines, unsigned token) {
    const long long* ids = (const long long*)given.in[input];
    const unsigned count = given.count[input];
    const long long row = count == 1 ? ids[0] + token % given.sequence : ids[token % count];
    const long long last = (long long)min(given.count[cosines], given.count[sines]) - 1;
    return row < 0 ? 0 : row < last ? row : last;
}

__device__ float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
__device__ float tanh_of(float x) { return 1 - 2 * sigmoid(-2 * x); }
__device__ float power(float x, float y) { return y == 2 ? x * x : y == 3 ? x * x * x : powf(x, y); }
__device__ float gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }
__device__ float gelu_tanh(float x) { return 0.5f * x * (1 + tanh_of(0.79788456f * (x + 0.044715f * x * x * x))); }
"""
# What operators of one, two and three numbers compute.
POINTWISE: Mapping[str, str] = {
    "Add": "{0} + {1}",
    "Sub": "{0} - {1}",
    "Mul": "{0} * {1}",
    "Div": "{0} / {1}",
    "Pow": "power({0}, {1})",
    "Max": "{0} < {1} || {1} != {1} ? {1} : {0}",  # a NaN stays one, here and below
    "Min": "{0} > {1} || {1} != {1} ? {1} : {0}",
    "Neg": "-{0}",
    "Relu": "{0} > 0 ? {0} : 0",
    "Sigmoid": "sigmoid({0})",
    "Tanh": "tanh_of({0})",
    "Erf": "erff({0})",
    "Gelu": "gelu({0})",
    "GeluTanh": "gelu_tanh({0})",
    "QuickGelu": "{0} * sigmoid({alpha} * {0})",
    "Clip": "{0} < {1} ? {1} : {0} > {2} ? {2} : {0}",
}


@dataclass(frozen=True)
class Launch:
    """How a kernel's threads share the rows: `threads` a row, with `vectors` each, and `rows` in a block."""

    threads: int
    vectors: int
    rows: int


def launch_of(columns: int) -> Launch:
    """The launch for rows of so many columns, a multiple of WIDTH."""
    whole = columns // WIDTH
    if whole <= WARP:
        threads = 1 << (whole - 1).bit_length()
        return Launch(threads, 1, SEVERAL // threads)
    vectors = -(-whole // MOST)
    return Launch(-(-whole // vectors // WARP) * WARP, vectors, 1)


def source_of(kernels: Iterable[Fused]) -> str:
    """The CUDA source of kernels, which have their names."""
    kernels = list(kernels)
    conversions = [CONVERSIONS[dtype] for dtype in sorted({kernel.dtype for kernel in kernels})]
    lines = (line for kernel in kernels for line in _kernel(kernel))
    return "\n".join([f"#define INPUTS {INPUTS}", f"#define WIDTH {WIDTH}", *conversions, HEAD, *lines])


def _kernel(kernel: Fused) -> list[str]:
    """The lines of a kernel, which stores the result of its last step."""
    launch, (_, pair) = launch_of(kernel.columns), HALVES[kernel.dtype]
    lines = [
        f'extern "C" __global__ void __launch_bounds__({launch.threads * launch.rows})',
        f"{kernel.name}(const Arguments given) {{",
        f"const unsigned lane = threadIdx.x % {launch.threads};",
        f"const unsigned row = blockIdx.x * {launch.rows} + threadIdx.x / {launch.threads};",
        "const bool inside = row < given.rows;",
    ]
    loaded: set[int] = set()
    for number, step in enumerate(kernel.steps, len(kernel.inputs)):
        # As late as possible: registers are few.
        for place in sorted(set(step.reads) - loaded):
            lines += _read(kernel, place) if place < len(kernel.inputs) else []
        loaded.update(step.reads)
        lines += _STEPS.get(step.operator, _pointwise)(kernel, step, number)
    lines += [
        *_loop(kernel),
        f"if (active) store<{pair}>(given.out, (size_t)row * {kernel.columns} + column, v{number}[k]);",
    ]
    return [*lines, "}", "}"]


def _loop(kernel: Fused) -> Sequence[str]:
    """The head of a loop over a thread's vectors, which has to be closed."""
    launch = launch_of(kernel.columns)
    return (
        "#pragma unroll",
        f"for (int k = 0; k < {launch.vectors}; ++k) {{",
        f"const unsigned column = {WIDTH} * (lane + k * {launch.threads});",
        f"const bool active = inside && column < {kernel.columns};",
    )


def _values(kernel: Fused, number: int, expression: str) -> list[str]:
    """A value whose numbers are an expression of k and j."""
    vectors = launch_of(kernel.columns).vectors
    return [
        f"float v{number}[{vectors}][{WIDTH}];",
        *_loop(kernel),
        "#pragma unroll",
        f"for (int j = 0; j < {WIDTH}; ++j) v{number}[k][j] = {expression};",
        "}",
    ]


def _read(kernel: Fused, number: int) -> list[str]:
    """An input's numbers for this row: its vectors, or one number. A step reads its tables and positions itself."""
    given, (one, pair) = kernel.inputs[number], HALVES[kernel.dtype]
    count = f"given.count[{number}]"
    rows = {"all": "row", "leading": f"row / (given.rows / {count})", "trailing": f"row % {count}"}.get(given.span)
    if rows is None:
        return []
    if given.width == 1:
        return [f"const float v{number} = inside ? as_float(((const {one}*)given.in[{number}])[{rows}]) : 0;"]
    vectors = launch_of(kernel.columns).vectors
    return [
        f"float v{number}[{vectors}][{WIDTH}] = {{}};",
        f"const size_t from{number} = (size_t)({rows}) * {kernel.columns};",
        *_loop(kernel),
        f"if (active) load<{pair}>(v{number}[k], given.in[{number}], from{number} + column);",
        "}",
    ]


def _number(kernel: Fused, place: int) -> str:
    """A value's number at k and j."""
    single = place < len(kernel.inputs) and kernel.inputs[place].width == 1
    return f"v{place}" if single else f"v{place}[k][j]"


def _pointwise(kernel: Fused, step: FusedStep, number: int) -> list[str]:
    reads = [_number(kernel, place) for place in step.reads]
    numbers = {name: f"{value!r}f" for name, value in step.numbers.items()}
    return _values(kernel, number, POINTWISE[step.operator].format(*reads, **numbers))


def _norm(kernel: Fused, step: FusedStep, number: int) -> list[str]:
    """LayerNormalization, or RMSNorm, which takes no mean. The variance is that of differences, as it is more exact."""
    data, scale, *shift = step.reads
    epsilon, mean = step.numbers["epsilon"], f"mean{number}"

    def total(name: str, expression: str) -> list[str]:
        return [
            f"float {name} = 0;",
            *_loop(kernel),
            "#pragma unroll",
            f"for (int j = 0; j < {WIDTH}; ++j) if (active) {name} += {expression};",
            "}",
            f"{name} = sum<{launch_of(kernel.columns).threads}>({name}) / {kernel.columns};",
        ]

    value = f"v{data}[k][j]"
    lines = total(mean, value) if step.operator == "LayerNormalization" else [f"const float {mean} = 0;"]
    lines += total(f"square{number}", f"({value} - {mean}) * ({value} - {mean})")
    lines.append(f"const float scale{number} = rsqrtf(square{number} + {epsilon!r}f);")
    result = f"({value} - {mean}) * scale{number} * {_number(kernel, scale)}"
    return lines + _values(kernel, number, " + ".join([result, *(_number(kernel, place) for place in shift)]))


def _rotary(kernel: Fused, step: FusedStep, number: int) -> list[str]:
    """Rotary embedding of heads that are rows. Pairs are neighbors, or a half of the row apart."""
    data, _, *tables = step.reads
    heads, half, vectors = int(step.numbers["heads"]), kernel.columns // 2, launch_of(kernel.columns).vectors
    _, pair = HALVES[kernel.dtype]
    if step.numbers["interleaved"]:
        load, first, angle = f"load<{pair}, {WIDTH // 4}>", "column / 2", "j / 2"
        partner, sign = f"v{data}[k][j ^ 1]", "(j % 2 ? 1 : -1)"
    else:
        load, first, angle = f"load<{pair}>", f"column % {half}", "j"
        partner = f"__shfl_xor_sync(~0u, v{data}[k][j], {half // WIDTH})"
        sign = f"(lane < {half // WIDTH} ? -1 : 1)"
    places = ", ".join(map(str, step.reads[1:]))
    lines = [
        f"const unsigned token{number} = inside ? row / {heads} : 0;",
        f"const long long position{number} = position(given, {places}, token{number});",
        f"float cosine{number}[{vectors}][{WIDTH}], sine{number}[{vectors}][{WIDTH}];",
        *_loop(kernel),
        "if (active) {",
        *(
            f"{load}({name}{number}[k], given.in[{table}], position{number} * {half} + {first});"
            for name, table in zip(("cosine", "sine"), tables, strict=True)
        ),
        "}",
        "}",
    ]
    turned = f"v{data}[k][j] * cosine{number}[k][{angle}] + {sign} * {partner} * sine{number}[k][{angle}]"
    return lines + _values(kernel, number, turned)


_STEPS: Mapping[str, Callable[[Fused, FusedStep, int], list[str]]] = {
    "LayerNormalization": _norm,
    "RMSNormalization": _norm,
    "RotaryEmbedding": _rotary,
}
