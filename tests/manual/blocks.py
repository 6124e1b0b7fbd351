"""A reader who types the blocks of a page of the manual, in a short version.

`examples/follow.py` reads the blocks and says which comments they may have. Two more comments hold
for a whole page:

    <!-- bfl run gets: FLAGS -->      flags that the test adds to each ``bfl run``
    <!-- set up: NAME -->             files and names that the page takes for granted (SET_UPS)
"""

import importlib.util
import re
import shlex
import sys
import types
import warnings
from pathlib import Path

from bflcore.errors import RunWarning

FOLLOW = Path(__file__).parents[2] / "examples" / "follow.py"
NUMBER = re.compile(r"(?<![A-Za-z])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def imported(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


follow = imported(FOLLOW)


def of_page(page, comment):
    """Return what the page's comment of this name says; "" without one."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {comment}: (.*?) -->", text, re.DOTALL)
    return found[1] if found else ""


def hospitals():
    """Write tables of patients of three hospitals; return the same data as Python holds them."""
    import numpy as np
    import pandas as pd
    import torch

    random = np.random.default_rng(0)
    x = random.normal(size=(90, 2)).astype("float32")
    y, owner = (x[:, 0] > 0).astype("int64"), np.arange(90) % 3
    frame = pd.DataFrame(
        {
            "age": 60 + 10 * x[:, 0],
            "dose": x[:, 1],
            "outcome": np.where(y == 1, "ill", "well"),
            "hospital": np.array(["charite", "ukb", "mercy"])[owner],
        }
    )
    frame.to_csv("patients.csv", index=False)
    new = frame[["dose", "age"]].head(4)
    new.to_csv("new.csv", index=False)
    dataset = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return {"x": x, "y": y, "owner": owner, "frame": frame, "new": new, "dataset": dataset}


def readme():
    """Add what README.md takes for granted: other files, arrays, and the components of a method."""
    import numpy as np

    import bflcore
    from bfl_bpfed.plugin import ReinforcedVariational

    found = hospitals()
    x, y, owner = found["x"], found["y"], np.array([7, 107, 207])[found["owner"]]
    np.savez("my.npz", x=x, y=y, client=owner)
    np.savez("mine.npz", x=x[:20], y=y[:20])
    np.savez("new.npz", x=x[:4])
    parts = {name: getattr(bflcore, name) for name in ("Method", "Equal", "Continual")}
    arrays = {"X": x, "hospital": owner, "X_new": x[:4], "hospital_new": owner[:4]}
    return {
        **found,
        **parts,
        **arrays,
        "bflcore": bflcore,
        "ReinforcedVariational": ReinforcedVariational,
    }


SET_UPS = {"hospitals": hospitals, "readme": readme, "": dict}


def masked(text):
    """Return the lines of an output with every number as ``#`` and single spaces."""
    lines = (" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines())
    return [line for line in lines if line]


class Reader:
    """Somebody who types a page's blocks, one after another."""

    def __init__(self, page, bfl, capsys):
        self.page, self.bfl, self.capsys = page, bfl, capsys
        self.flags = shlex.split(of_page(page, "bfl run gets"))
        self.module = types.ModuleType("manual_page")
        vars(self.module).update(SET_UPS[of_page(page, "set up")]())
        self.printed = ""

    def type(self, block):
        """Execute, write or compare one block."""
        if block.writes is not None:
            Path(block.writes).write_text(block.text, encoding="utf-8")
        elif block.prints:
            missing = [line for line in masked(block.text) if line not in masked(self.printed)]
            assert not missing, f"line {block.line}: not printed: {missing}; was\n{self.printed}"
        elif block.info == "bash" and block.reason is None:
            words = follow.commands(block.short())
            self.printed = "".join(self.command(each, block.line) for each in words)
        elif block.info == "python" and block.reason is None:
            code = compile("\n" * block.line + block.short(), str(self.page), "exec")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RunWarning)
                exec(code, vars(self.module))
            self.printed = self.capsys.readouterr().out

    def command(self, words, line):
        """Run one command of ours; return all that it printed."""
        assert words[0] == "bfl", f"line {line}: {words[0]} is not ours: mark the block as not run"
        more = self.flags if words[1] == "run" else []
        status, out, err = self.bfl(*words[1:], *more)
        assert status == 0, f"line {line}: {shlex.join(words)} failed: {err}"
        return out + err
