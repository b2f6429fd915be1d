"""The likeliest next tokens, one at a time. The caches stay on the devices of the package."""

import argparse

import numpy as np

from splitc.runtime import Session

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("package")
parser.add_argument("--prompt", type=int, nargs="+", default=[5, 17, 33])
parser.add_argument("--count", type=int, default=8)
options = parser.parse_args()

with Session(options.package) as session, session.start(capacity=256) as sequence:
    tokens, new = list(options.prompt), list(options.prompt)
    for _ in range(options.count):
        total = len(tokens)
        outputs = sequence.run(
            {
                "input_ids": np.array([new]),
                "attention_mask": np.ones((1, total), np.int64),
                "position_ids": np.arange(total - len(new), total)[None],
            }
        )
        new = [int(outputs["logits"][0, -1].argmax())]
        tokens += new
    print(*tokens)
    # The same in one call, which finds the inputs by what the graph does with them.
    assert list(session.generate(options.prompt, max_new_tokens=options.count)) == tokens[len(options.prompt) :]
