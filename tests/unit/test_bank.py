"""The bank on the device: rows lie where they were put."""

import torch

from patchclamp.runtime.host_step import Bank


def test_rows_lie_where_they_were_put():
    bank = Bank(40)
    rows = torch.arange(12.0).view(3, 4)
    bank.data.fill_(-1)
    bank.write(8, [rows])
    assert torch.equal(bank.data[8:20].view(3, 4), rows)
    assert (bank.data[:8] == -1).all()
    assert (bank.data[20:] == -1).all()
