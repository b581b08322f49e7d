"""The house style: the same bytes whatever the user's settings, which stay; files in one piece."""

import matplotlib
import numpy as np
import pytest
from cycler import cycler

from experiments.figures import style

HOSTILE = {
    "axes.facecolor": "red",
    "axes.grid": False,
    "axes.prop_cycle": cycler(color=["lime"]),
    "backend": "svg",
    "figure.figsize": (1, 1),
    "figure.facecolor": "black",
    "font.family": "serif",
    "font.size": 30,
    "lines.linewidth": 9,
    "savefig.bbox": "tight",
    "savefig.dpi": 20,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "text.usetex": True,
}


def drawn(folder):
    """The bytes of a figure of lines, text and ticks, as PNG and SVG."""
    with style.house():
        figure, ((ax, other),) = style.new_figure(1, 2)
        ax.plot([0, 1, 2], [1, 3, 2], label="line")
        ax.set(title="$x^2$", xlabel="a_b %")
        ax.legend()
        other.imshow(np.eye(3))
        return [path.read_bytes() for path in style.save(figure, folder / "a.b")]


def test_the_users_settings_change_no_byte_and_stay(tmp_path):
    expected = drawn(tmp_path / "plain")
    with matplotlib.rc_context():
        matplotlib.rcParams.update(HOSTILE)
        before = dict(matplotlib.rcParams)
        assert drawn(tmp_path / "hostile") == expected
        assert dict(matplotlib.rcParams) == before
        assert matplotlib.get_backend() == "svg"
    assert b"<dc:date>" not in expected[1]
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["a.b.png", "a.b.svg"]


def test_a_figure_is_replaced_in_one_piece(tmp_path, monkeypatch):
    expected = drawn(tmp_path)

    def half(self, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("matplotlib.figure.Figure.savefig", half)
        drawn(tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("a.b.png", "a.b.svg")] == expected
    assert drawn(tmp_path) == expected
    assert len(list(tmp_path.iterdir())) == 2


def test_no_figure_is_left_with_pyplot(tmp_path):
    import matplotlib.pyplot as plt

    drawn(tmp_path)
    assert plt.get_fignums() == []
