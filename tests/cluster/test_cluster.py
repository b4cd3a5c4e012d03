"""Clusters and meshes: what is built, how text reads and prints, what bad text is told; docs/clusters.md is true."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superscaler.cluster import LOCAL, PRESETS, Cluster, Device, DeviceKind, Link, Links, known
from superscaler.cluster.devices import Attention, Speeds
from superscaler.errors import InputError


def test_devices_are_numbered_server_by_server() -> None:
    cluster = Cluster.preset("v100", servers=2, devices_per_server=2)
    assert cluster.devices == (
        Device(0, 0, "v100"),
        Device(1, 0, "v100"),
        Device(2, 1, "v100"),
        Device(3, 1, "v100"),
    )
    assert (cluster.servers, cluster.devices_per_server, cluster.kind) == (2, 2, "v100")


@pytest.mark.parametrize("name", sorted({*PRESETS} - {LOCAL}))
def test_presets_hold_bytes_and_flops_per_second(name: str) -> None:
    kind = Cluster.preset(name, 1, 1).device_kind
    assert kind is not None
    assert kind.name == name
    assert 16 * 10**9 <= kind.memory < 10**12
    # Half precision runs on matrix units, which are some times faster: 3.9 on an L40S.
    assert 10**13 < kind.flops["float32"] * 2 < kind.flops["float16"] < 10**16


positive = st.floats(1e-30, 1e30)


DTYPES = ("float64", "float32", "bfloat16", "float16")


@settings(max_examples=5)
@given(
    name=st.one_of(st.sampled_from(sorted(PRESETS)), st.text(min_size=1, max_size=9).filter(str.isprintable)),
    kind=st.sampled_from(sorted(PRESETS)),
    servers=st.integers(1, 5),
    links=st.none()
    | st.builds(Links, *[st.builds(Link, alpha=st.floats(0, 1), bandwidth=positive)] * 4, nics=st.sampled_from([1, 3])),
    device=st.none() | st.tuples(st.integers(1, 10**15), st.dictionaries(st.sampled_from(DTYPES), positive)),
)
def test_every_cluster_reads_back_from_its_text(
    name: str, kind: str, servers: int, links: Links | None, device: tuple[int, dict[str, float]] | None
) -> None:
    known = PRESETS[kind].device
    flops = {**(known.flops if known else {}), **(device[1] if device else {})}
    told = DeviceKind(kind, device[0], flops, known.speeds if known else None) if device else None
    cluster = Cluster.of(name, kind, servers, 6, links, told)
    read = Cluster.parse(str(cluster))
    assert (read, hash(read)) == (cluster, hash(cluster))


def test_a_file_replaces_numbers_of_the_preset() -> None:
    text = "{name: lab, preset: v100, servers: 2, devices_per_server: 8, links: {intra: {bandwidth: 1e11}, nics: 2}}"
    cluster, known = Cluster.parse(text), PRESETS["v100"].links
    assert cluster.links.intra == cluster.links.pair == Link(known.intra.alpha, 1e11)
    assert (cluster.links.network, cluster.links.nics, cluster.device_kind) == (
        known.network,
        2,
        PRESETS["v100"].device,
    )
    assert Cluster.parse(text.replace("nics: 2", "pair: {alpha: 5e-6}")).links.pair == Link(5e-6, 1e11)
    assert Cluster.parse(text.replace("nics: 2", "nics: null")).links.nics is None
    assert Cluster.parse(text.replace("name: lab, ", "")).name == "v100"


def test_a_file_replaces_what_is_known_of_the_devices() -> None:
    text = (
        "{name: lab, preset: a100, servers: 1, devices_per_server: 8, device: {memory: 40e9, flops: {float64: 1e13}}}"
    )
    kind = Cluster.parse(text).device_kind
    known = PRESETS["a100"].device
    assert known is not None
    assert kind == replace(known, memory=40 * 10**9, flops={**known.flops, "float64": 1e13})
    local = Cluster.parse(text.replace("a100", "local"))
    assert local.device_kind == DeviceKind("local", 40 * 10**9, {"float64": 1e13})
    assert local.is_local


def test_a_file_replaces_speeds_of_the_preset() -> None:
    text = "{name: lab, preset: a100, servers: 1, devices_per_server: 8, device: {speeds: {SPEEDS}}}"
    a100 = PRESETS["a100"].device
    assert a100 is not None
    known = a100.speeds
    assert known is not None
    given = "issue: 4e-6, memory: 1e12, products: {float64: [9e12, 19e12]}, operators: {gelu: {alpha: 0, bandwidth: 1}}"
    speeds = replace(
        known,
        issue=4e-6,
        memory=(1e12, 1e12),
        products={**known.products, "float64": (9e12, 19e12)},
        operators={**known.operators, "gelu": Link(0.0, 1.0)},
    )
    kind = Cluster.parse(text.replace("SPEEDS", given)).device_kind
    assert kind == replace(a100, speeds=speeds)
    attention = "attention: {forward: {rates: {64: 1e12, 128: [2e12, 3e12]}, tile: 512}}"
    local = "preset: local, servers: 1, devices_per_server: 2, device: {memory: 8e9, flops: {}, speeds: "
    lab = Cluster.parse("{name: lab, " + local + "{products: {float32: 1e11}, memory: 2e10, " + attention + "}}}")
    assert lab.device_kind is not None
    measured = Attention({64: (1e12, 1e12), 128: (2e12, 3e12)}, tile=512)
    assert lab.device_kind.speeds == Speeds(0, {"float32": (1e11, 1e11)}, (2e10, 2e10), {"forward": measured})
    assert Cluster.parse(str(lab)) == lab


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of presets, with those of the library."""
    for path in known._FOLDER.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(known, "_FOLDER", tmp_path)
    known._names.cache_clear()
    yield tmp_path
    known._names.cache_clear()
    known._read.cache_clear()


SPEEDS = "{units: 4, products: {float32: 1e12}, memory: [100e9, 300e9], shares: {norm: 0.5}}"
ALL = "{alpha: 1e-6, bandwidth: 1e9}"
LINKS = f"{{device: {ALL}, intra: {{alpha: 2e-6, bandwidth: 2e9}}, network: {ALL}, host: {ALL}, nics: null}}"
DEVICE = f"{{memory: 8e9, flops: {{float32: 1e12}}, speeds: {SPEEDS}}}"


def test_a_preset_is_one_file(folder: Path) -> None:
    (folder / "x300.yaml").write_text(f"links: {LINKS}\ndevice: {DEVICE}")
    (folder / "x310.yaml").write_text("preset: x300\nlinks: {nics: 1}\ndevice: {speeds: {memory: 400e9, shares: {}}}")
    cluster, kind = Cluster.parse("x300:2x4"), Cluster.parse("x300:2x4").device_kind
    assert (str(cluster), cluster.links.pair, cluster.links.nics) == ("x300:2x4", Link(2e-6, 2e9), None)
    assert kind is not None
    assert (kind.name, kind.memory, kind.flops) == ("x300", 8 * 10**9, {"float32": 1e12})
    # Shares of the middle of both bandwidths of memory.
    assert kind.speeds is not None
    assert (kind.speeds.operators["norm"], kind.speeds.operators["copy"]) == (Link(0.0, 100e9), Link(0.0, 150e9))
    other = Cluster.parse("x310:1x1")
    assert (other.links, other.device_kind.name) == (replace(cluster.links, nics=1), "x310")
    assert other.device_kind.speeds.operators["norm"] == Link(0.0, 340e9)
    with pytest.raises(InputError, match=r"Known: a100, b200, h100, h200, local, v100, x300, x310\."):
        Cluster.parse("y:1x1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"device: {DEVICE}", "nothing is known about x300 devices; add links.device.alpha too"),
        (f"links: {LINKS.replace(', nics: null', '')}", "add links.nics too, null for one a device"),
        (f"links: {LINKS}\ndevice: {{memory: 8e9}}", "nothing is known about x300 devices; add device.flops too"),
        (f"links: {LINKS}\ndevice: {DEVICE.replace('products', 'product')}", "did you mean 'products'?"),
        ("preset: h10", "unknown preset 'h10'; did you mean 'h100'?"),
        ("servers: 3", "unknown key 'servers'. Known: device, links, preset."),
    ],
)
def test_a_preset_without_its_numbers_is_an_error_that_names_them(folder: Path, text: str, message: str) -> None:
    (folder / "x300.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as found:
        Cluster.parse("x300:1x1")
    assert str(found.value).startswith(f"preset {folder / 'x300.yaml'}: ")


def test_a_short_text_is_the_spec() -> None:
    for spec in ("local:4", "v100:4x8", "h200:2x1"):
        assert str(Cluster.parse(spec)) == spec
    assert Cluster.parse("local:4").device_kind is None


LAB = "{name: a, preset: v100, servers: 2, devices_per_server: 8, "


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("link: {}}", "unknown key 'link'; did you mean 'links'?"),
        (
            "links: {net: {}}}",
            "unknown key 'net'; did you mean 'network'? Known: curves, device, host, intra, network, nics, pair, "
            "starts, steps.",
        ),
        ("links: {intra: {bandwith: 1}}}",
         "'bandwith'; did you mean 'bandwidth'? Known: alpha, bandwidth. It is in intra."),
        ("links: {intra: {bandwidth: 0}}}", "links.intra.bandwidth is 0, but input should be greater than 0."),
        ("links: {intra: {bandwidth: .inf}}}", "links.intra.bandwidth is inf, but input should be a finite number."),
        ("links: {network: {alpha: -1e-6}}}", "links.network.alpha is '-1e-6', but input should be greater than or"),
        ("links: {network: {alpha: fast}}}", "links.network.alpha is 'fast', but input should be a valid number."),
        ("links: {network: {alpha: yes}}}", "links.network.alpha is True, but input should be a valid number."),
        ("links: {nics: 3}}", "cluster 'a' would share 3 NICs among the 8 devices of a server; one number must divide"),
        ("links: {nics: 0}}", "links.nics is 0, but input should be greater than 0."),
        ("links: 3}", "links is 3, but input should be"),
        ("links:}", "links is None, but input should be"),
        ("device: {memory: 0.5}}", "device.memory is 0.5, but input should be greater than or equal to 1."),
        ("device: {flops: {float32: x}}}", "device.flops.float32 is 'x', but input should be a valid number."),
        ("device: {flops: {1: 2}}}", "device.flops.1"),
        ("device: {flops: {bf16: 2e14}}}", "unknown key 'bf16'; did you mean 'bfloat16'?"),
        ("device: {speeds: {products: {}}}}", "device.speeds.products is {}, but dictionary should have at least 1"),
        ("device: {speeds: {attention: {fwd: {rates: {64: 1}}}}}}", "unknown key 'fwd'; did you mean 'forward'?"),
        ("links: {curves: {allreduce: {1: 2}}}}", "unknown key 'allreduce'; did you mean 'all_reduce'?"),
        ("device: {speeds: {memory: [1, x]}}}", "device.speeds.memory.1 is 'x', but input should be a valid number."),
        ("device: {speeds: {memory: [1, 2, 3]}}}",
         "device.speeds.memory is (1, 2, 3), but tuple should have at most 2"),
        ("device: {speeds: {unit: 3}}}", "unknown key 'unit'; did you mean 'units'?"),
        ("device: {speeds: {units: -3}}}",
         "device.speeds.units is -3, but input should be greater than or equal to 0."),
        ("device: {speeds: {operators: {gelu: {alpha: 1}}}}}",
         "the key 'device.speeds.operators.gelu.bandwidth' is mi"),
        ("device: {speeds: {operators: {gelu: {alpha: 1, bandwith: 1}}}}}",
         "unknown key 'bandwith'; did you mean 'bandwidth'? Known: alpha, bandwidth. It is in gelu."),
        ("device: {speeds: {attention: {forward: {rates: {}}}}}}",
         "device.speeds.attention.forward.rates is {}, but di"),
        ("preset: local, device: {memory: 1, flops: {}, speeds: {memory: 1}}}",
         "nothing is known about local devices; add device.speeds.products too."),
        ("1: 2}", "unknown key '1'"),
        ("preset: local, device: {memory: 1e9}}", "nothing is known about local devices; add device.flops too"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(more: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Cluster.parse((LAB.replace("preset: v100, ", "") if more.startswith("preset") else LAB) + more)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("v10:4x8", "unknown cluster 'v10'; did you mean 'v100'?"),
        ("", "write local:N, PRESET:SERVERSxDEVICES"),
        ("local", "write local:N, as local:4"),
        ("local:two", "write local:N, as local:4"),
        ("local:0", "1 servers with 0 devices each; both numbers must be 1 or more"),
        ("local:99999999", "99999999 devices; at most 1000000 fit"),
        ("v100:4", "write v100:SERVERSxDEVICES, as v100:4x8"),
        ("v100:0x8", "0 servers with 8 devices each"),
        ("nowhere.yaml", "there is no cluster file nowhere.yaml"),
        ("{name: lab, servers: 2, devices_per_server: 1}", "the key 'preset' is missing; add preset: VALUE"),
        ("{name: a, preset: v1000, servers: 2, devices_per_server: 1}", "did you mean 'v100'?"),
        ("{name: a, preset: v100, severs: 2, devices_per_server: 1}", "'severs'; did you mean 'servers'?"),
        ("{name: a, preset: v100, servers: two, devices_per_server: 1}", "servers is 'two', but input should be"),
        ("{name: a, preset: v100, servers: 0, devices_per_server: 1}", "servers is 0, but input should be greater"),
        ("{name: a", "is not YAML"),
        ("{name: '', preset: v100, servers: 2, devices_per_server: 1}", "cannot be called ''"),
    ],
)
def test_bad_text_is_told_what_to_write(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Cluster.parse(spec)


@pytest.mark.parametrize("count", ["2", 2.5])
def test_a_number_of_devices_is_whole(count: object) -> None:
    with pytest.raises(InputError, match="both must be whole numbers"):
        Cluster.local(count)  # type: ignore[arg-type]


# Meshes.


def test_places_along_some_axes_are_a_mesh_of_the_others() -> None:
    mesh = Cluster.local(12).mesh(pp=2, dp=-1, tp=2)
    assert str(mesh) == "pp=2,dp=3,tp=2"
    assert [device.id for device in mesh.at(pp=1, tp=0).devices] == [6, 8, 10]
    assert mesh.at(dp=2).sizes == {"pp": 2, "tp": 2}
    assert [device.id for device in mesh.at(pp=1, dp=1, tp=1).devices] == [9]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "tp": 3}, "mesh dp=2,tp=3 needs 6 devices, but there are 8; make the two numbers equal"),
        ({"dp": 3, "tp": -1}, "mesh dp=3,tp=-1: 3 does not divide the 8 devices; choose 1, 2, 4 or 8"),
        ({"dp": -1, "tp": -1}, "mesh dp=-1,tp=-1: every size must be at least 1, and one may be -1"),
        ({"dp": 0, "tp": 8}, "mesh dp=0,tp=8: every size must be at least 1"),
        ({"dp": 8.0}, "mesh dp=8.0: every size must be at least 1"),
    ],
)
def test_sizes_that_are_not_the_number_of_devices_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Cluster.local(8).mesh(**sizes)


def test_places_that_a_mesh_lacks_are_refused() -> None:
    mesh = Cluster.local(8).mesh(data=2, tensor=4)
    with pytest.raises(InputError, match=r"mesh data=2,tensor=4: unknown axis 'date'; did you mean 'data'"):
        mesh.at(date=1)
    with pytest.raises(InputError, match=r"has places 0 to 3 along tensor, but not 4"):
        mesh.at(tensor=4)


# The page.

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_python_and_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text(blocks("yaml")[0])
    example = doctest.DocTestParser().get_doctest("\n".join(blocks("python")), {}, "clusters.md", None, 0)
    assert len(example.examples) > 5
    words: list[str] = []
    assert doctest.DocTestRunner().run(example, out=words.append).failed == 0, "".join(words)
    lab = Cluster.parse("lab.yaml")
    assert lab.links.network == Link(5e-6, 24e9)
    assert Cluster.parse(str(lab)) == lab


def test_the_table_of_presets() -> None:
    for name, links in ((name, preset.links) for name, preset in PRESETS.items()):
        cells = re.search(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
        assert cells is not None
        *told, nics = cells[1].split(" | ")
        for link, cell in zip((links.device, links.pair, links.intra, links.network, links.host), told, strict=True):
            assert [float(x) for x in cell.split(", ")] == pytest.approx([link.alpha * 1e6, link.bandwidth / 1e9])
        assert nics == ("1 a device" if links.nics is None else f"{links.nics} a server")
