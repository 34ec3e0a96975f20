"""README names what there is: every logged key, every rule, commands whose files exist."""

import re
from pathlib import Path

import pytest
import torch

import attnmon
from attnmon.alerts import AlertRules
from attnmon.dashboard import QUANTITIES
from attnmon.quantities import ALL, DEFAULT

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.name)
def test_every_quantity_has_its_row(quantity):
    argument = {"N": "N", "m": "m", "m, epsilon": "m_epsilon_e", "": ""}[quantity.argument]
    key = f"| `attn/{quantity.tag.format(argument)}/layer_03`"
    (row,) = [line for line in README.splitlines() if line.startswith(key)]
    on_request = quantity.name not in DEFAULT and quantity.name != "active_share"
    assert (" * |" in row) == on_request
    assert f"| {quantity.range} | {quantity.rise} | {quantity.fall} |" in row


def test_dashboard_and_monitor_know_the_same_quantities():
    assert {quantity.name for quantity in QUANTITIES} == set(ALL)


def test_every_rule_is_explained():
    for rule in AlertRules().active():
        assert f"| `{rule.name}` |" in README


def test_files_that_readme_names_exist():
    for name in re.findall(r"(?:configs|recipes)/[\w/.-]+\.\w+", README):
        assert (ROOT / name).is_file(), name


def test_the_functions_example_runs():
    (code,) = re.findall(r"```python\n(import torch\nfrom attnmon.functional.*?)```", README, flags=re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    assert torch.is_tensor(scope["weights"])


def test_public_names():
    for name in attnmon.__all__:
        assert getattr(attnmon, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        attnmon.nothing  # noqa: B018
