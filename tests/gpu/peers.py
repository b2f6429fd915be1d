"""The decoder of `tests.gpu.table` in PyTorch with tensor parallelism, and with accelerate's device map.

    python -m tests.gpu.peers --gpus 2

Tensor parallelism is Megatron's, written by hand with torch.distributed, with a process for each GPU: projections are
column-parallel, then row-parallel, with two all-reduces a layer. Steps of one token and prompts are captured as CUDA
graphs, all-reduces included. `device_map="auto"` is transformers' Llama, distributed over the GPUs by accelerate; it
runs eagerly. Needs PyTorch, transformers and accelerate.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.functional as F

RUNS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=512)
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    for world in sorted({1, options.gpus}):
        torch.multiprocessing.spawn(_run_rank, (world, options), nprocs=world)
    print(f"accelerate, {options.gpus} GPUs: {_accelerate(options)}", flush=True)


class Decoder(torch.nn.Module):  # type: ignore[misc]  # torch is not typed where it is missing
    """A rank's shard of a Llama, with weights of zeros and a cache of a fixed size."""

    def __init__(self, world: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.world, self.layers, hidden = world, options.layers, options.hidden
        self.size = 128
        self.heads = hidden // self.size // world
        self.kv_heads = self.heads // 4
        inner = hidden * 7 // 2 // world
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
        self.embed = torch.zeros(options.vocabulary, hidden, **make)
        self.head = torch.zeros(options.vocabulary // world, hidden, **make)
        self.norm = torch.ones(hidden, **make)
        self.qkv = torch.zeros(self.layers, (self.heads + 2 * self.kv_heads) * self.size, hidden, **make)
        self.out = torch.zeros(self.layers, hidden, self.heads * self.size, **make)
        self.gate_up = torch.zeros(self.layers, 2 * inner, hidden, **make)
        self.down = torch.zeros(self.layers, hidden, inner, **make)
        self.cache = torch.zeros(self.layers, 2, 1, self.kv_heads, options.cache + options.prompt, self.size, **make)
        angles = torch.outer(torch.arange(8192, device="cuda"), 1e4 ** -(torch.arange(0, 64, device="cuda") / 64))
        self.cosine = torch.cos(angles).half().repeat(1, 2)
        self.sine = torch.cat([-torch.sin(angles), torch.sin(angles)], -1).half()

    @torch.no_grad()  # type: ignore[untyped-decorator]  # likewise
    def forward(self, ids: torch.Tensor, place: torch.Tensor, filled: int) -> torch.Tensor:
        """The logits after the last token. `filled` tokens of the cache are read."""
        hidden = F.embedding(ids, self.embed)
        cosine, sine = self.cosine[place], self.sine[place]
        count = ids.shape[1]
        for layer in range(self.layers):
            normed = F.rms_norm(hidden, self.norm.shape, self.norm)
            parts = F.linear(normed, self.qkv[layer]).view(1, count, -1, self.size).transpose(1, 2)
            turned, value = parts.split([self.heads + self.kv_heads, self.kv_heads], 1)
            query, key = self.rotate(turned, cosine, sine).split([self.heads, self.kv_heads], 1)
            cache = self.cache[layer]
            cache[0].index_copy_(2, place, key)
            cache[1].index_copy_(2, place, value)
            attended = F.scaled_dot_product_attention(
                query,
                cache[0, :, :, :filled],
                cache[1, :, :, :filled],
                is_causal=count > 1,
                enable_gqa=True,
            )
            hidden = hidden + self.sum(F.linear(attended.transpose(1, 2).reshape(1, count, -1), self.out[layer]))
            normed = F.rms_norm(hidden, self.norm.shape, self.norm)
            gate, up = F.linear(normed, self.gate_up[layer]).chunk(2, -1)
            hidden = hidden + self.sum(F.linear(F.silu(gate) * up, self.down[layer]))
        return F.linear(F.rms_norm(hidden[:, -1:], self.norm.shape, self.norm), self.head)

    def rotate(self, value: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(value * cosine, value.roll(self.size // 2, -1), sine)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            torch.distributed.all_reduce(value)
        return value


def _run_rank(rank: int, world: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world)
    model = Decoder(world, options)
    found = {}
    for name, count, start in (("token", 1, options.cache), ("prompt", options.prompt, 0)):
        ids = torch.ones(1, count, dtype=torch.int64, device="cuda")
        place = torch.arange(start, start + count, device="cuda")

        def run(ids: torch.Tensor = ids, place: torch.Tensor = place, filled: int = start + count) -> None:
            model(ids, place, filled)

        found[f"{name} eagerly"] = _time(run)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        found[name] = _time(graph.replay)
        del graph
    if rank == 0:
        print(f"PyTorch, {world} GPUs: {_texts(found)}", flush=True)
    torch.distributed.destroy_process_group()


def _accelerate(options: argparse.Namespace) -> str:
    from accelerate import dispatch_model, infer_auto_device_map
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=options.hidden // 512,
        dtype=torch.float16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).half()
    model.to_empty(device="cuda:0")
    size = sum(weight.nbytes for weight in model.parameters())
    memory = {gpu: int(1.3 * size / options.gpus) for gpu in range(options.gpus)}
    devices = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=["LlamaDecoderLayer"])
    model = dispatch_model(model.eval(), devices)
    found = {}
    with torch.no_grad():
        prompt = torch.ones(1, options.prompt, dtype=torch.int64, device="cuda:0")
        found["prompt"] = _time(lambda: model(prompt, logits_to_keep=1))
        cache = DynamicCache(config=config)
        model(torch.ones(1, options.cache, dtype=torch.int64, device="cuda:0"), past_key_values=cache, logits_to_keep=1)
        token = torch.ones(1, 1, dtype=torch.int64, device="cuda:0")
        found["token"] = _time(lambda: model(token, past_key_values=cache))
    return f"{_texts(found)}; layers on {sorted(set(devices.values()), key=str)}"


def _time(run: Callable[[], Any]) -> float:
    """Median seconds of calls, each awaited."""
    seconds = []
    for number in range(RUNS + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number >= 5:
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def _texts(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in found.items())


if __name__ == "__main__":
    main()
