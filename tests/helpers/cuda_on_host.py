"""CUDA kernels on the host: compiled as C++, with a thread of the system for each thread of a block.

So tests run the kernels that GPUs run, on machines without one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("g++")
# What kernels need of CUDA's headers. Blocks run one after the other, and all threads of a block come to each shuffle.
HEADER = """
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#define __device__ inline
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

struct Place { unsigned x; };
inline thread_local Place threadIdx, blockIdx;
inline std::barrier<>* block;
inline float exchanged[1024];
inline void __syncthreads() { block->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float mine, int away) {
    exchanged[threadIdx.x] = mine;
    __syncthreads();
    const float other = exchanged[threadIdx.x ^ away];
    __syncthreads();
    return other;
}
using std::min;
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct __half { uint16_t bits; };
struct __half2 { __half x, y; };
inline float __half2float(__half half) {
    const int exponent = half.bits >> 10 & 31, part = half.bits & 1023;
    const int whole = part + (exponent ? 1024 : 0);
    float value = exponent < 31 ? std::ldexp(whole, std::max(exponent, 1) - 25) : part ? NAN : INFINITY;
    return half.bits >> 15 ? -value : value;
}
inline __half __float2half_rn(float x) {
    const uint16_t sign = std::signbit(x) << 15;
    const float size = std::fabs(x);
    if (std::isnan(x)) return {0x7e00};
    if (size >= 65520) return {uint16_t(sign | 0x7c00)};
    int exponent;
    std::frexp(size, &exponent);
    exponent = std::max(exponent, -13);
    const int part = std::nearbyint(std::ldexp(size, 11 - exponent));  // of 11 bits, to the nearest even one
    return {uint16_t(sign | (part >= 1024 ? ((exponent + 13) << 10) + part : part))};
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 half) {
    const uint32_t bits = uint32_t(half.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (std::isnan(x)) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to the nearest even one
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
"""
# As CUDA's cuLaunchKernel, of a kernel with one argument.
LAUNCH = """
extern "C" int launch(void (*kernel)(const Arguments), unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                      unsigned, unsigned, void*, void** given, void**) {
    std::barrier meeting(threads);
    block = &meeting;
    for (unsigned number = 0; number < blocks; ++number) {
        std::vector<std::thread> all;
        for (unsigned thread = 0; thread < threads; ++thread)
            all.emplace_back([=] {
                blockIdx.x = number, threadIdx.x = thread;
                kernel(*(const Arguments*)given[0]);
            });
        for (std::thread& one : all) one.join();
    }
    return 0;
}
"""


def compile_on_host(source: str, folder: Path) -> ctypes.CDLL:
    """A library with the source's kernels, and `launch`."""
    (folder / "cuda_fp16.h").write_text("#pragma once" + HEADER)
    (folder / "cuda_bf16.h").write_text('#include "cuda_fp16.h"')
    (folder / "kernels.cpp").write_text(source + LAUNCH)
    command = [COMPILER or "g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", "-I", str(folder)]
    subprocess.run([*command, folder / "kernels.cpp", "-o", folder / "kernels.so"], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))
