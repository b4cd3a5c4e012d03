"""Clusters: what is built, how text reads and prints, and what bad text is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler.cluster import LINKS, LOCAL, PRESETS, Cluster, Device, DeviceKind, Link, Links
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


def test_a_local_cluster_is_one_server_of_which_nothing_is_known() -> None:
    cluster = Cluster.local(3)
    assert [device.server for device in cluster.devices] == [0, 0, 0]
    assert cluster.device_kind is None
    assert cluster.is_local
    assert not Cluster.preset("v100", 1, 3).is_local


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_bytes_and_flops_per_second(name: str) -> None:
    kind = Cluster.preset(name, 1, 1).device_kind
    assert kind is not None
    assert kind.name == name
    assert 16 * 10**9 <= kind.memory < 10**12
    # Half precision runs on matrix units, which are several times faster.
    assert 10**13 < kind.flops["float32"] * 4 < kind.flops["float16"] < 10**16


@given(
    name=st.one_of(
        st.just(LOCAL), st.sampled_from(sorted(PRESETS)), st.text(min_size=1, max_size=9).filter(str.isprintable)
    ),
    kind=st.sampled_from([LOCAL, *sorted(PRESETS)]),
    servers=st.integers(1, 5),
    per_server=st.integers(1, 9),
)
def test_every_cluster_reads_back_from_its_text(name: str, kind: str, servers: int, per_server: int) -> None:
    cluster = Cluster.of(name, kind, servers, per_server)
    assert Cluster.parse(str(cluster)) == cluster


positive = st.floats(1e-30, 1e30)


@given(
    kind=st.sampled_from([LOCAL, *sorted(PRESETS)]),
    links=st.builds(
        Links, *[st.builds(Link, alpha=st.floats(0, 1), bandwidth=positive)] * 4, nics=st.sampled_from([None, 1, 3, 12])
    ),
    device=st.none() | st.tuples(st.integers(1, 10**15), st.dictionaries(st.text(min_size=1, max_size=5), positive)),
)
def test_what_replaces_a_preset_reads_back(
    kind: str, links: Links, device: tuple[int, dict[str, float]] | None
) -> None:
    flops = {**(PRESETS[kind].flops if kind in PRESETS else {}), **(device[1] if device else {})}
    told = DeviceKind(kind, device[0], flops) if device else None
    cluster = Cluster.of(kind, kind, 1, 6, links, told)
    assert Cluster.parse(str(cluster)) == cluster
    assert hash(Cluster.parse(str(cluster))) == hash(cluster)


def test_a_file_replaces_numbers_of_the_preset() -> None:
    text = "{name: lab, preset: v100, servers: 2, devices_per_server: 8, links: {intra: {bandwidth: 1e11}, nics: 2}}"
    cluster, known = Cluster.parse(text), LINKS["v100"]
    assert cluster.links.intra == cluster.links.pair == Link(known.intra.alpha, 1e11)
    assert (cluster.links.network, cluster.links.nics, cluster.device_kind) == (known.network, 2, PRESETS["v100"])
    assert Cluster.parse(text.replace("nics: 2", "pair: {alpha: 5e-6}")).links.pair == Link(5e-6, 1e11)
    assert Cluster.parse(text.replace("nics: 2", "nics: null")).links.nics is None


def test_a_file_replaces_what_is_known_of_the_devices() -> None:
    text = "{name: lab, preset: a100, servers: 1, devices_per_server: 8, device: {memory: 40e9, flops: {float8: 1e15}}}"
    kind = Cluster.parse(text).device_kind
    assert kind == DeviceKind("a100", 40 * 10**9, {**PRESETS["a100"].flops, "float8": 1e15})
    local = Cluster.parse(text.replace("a100", "local"))
    assert local.device_kind == DeviceKind("local", 40 * 10**9, {"float8": 1e15})
    assert local.is_local


LAB = "{name: a, preset: v100, servers: 2, devices_per_server: 8, "


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("link: {}}", "unknown key 'link'; did you mean 'links'?"),
        (
            "links: {net: {}}}",
            "unknown key 'net'; did you mean 'network'? Known: device, host, intra, network, nics, pair.",
        ),
        (
            "links: {intra: {bandwith: 1}}}",
            "'bandwith'; did you mean 'bandwidth'? Known: alpha, bandwidth. It is in intra.",
        ),
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
        ("1: 2}", "unknown key '1'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(more: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Cluster.parse(LAB + more)


def test_half_of_what_is_known_of_a_local_device_is_refused() -> None:
    text = LAB.replace("v100", "local") + "device: {memory: 1e9}}"
    with pytest.raises(InputError, match=r"nothing is known about local devices; add device\.flops too"):
        Cluster.parse(text)


@pytest.mark.parametrize("spec", ["local:1", "local:4", "v100:4x8", "a100:1x8", "h100:128x8", "h200:2x1"])
def test_the_text_of_a_cluster_is_its_spec(spec: str) -> None:
    assert str(Cluster.parse(spec)) == spec


def test_a_file_gives_a_cluster_a_name(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("name: lab\nservers: 2\ndevices_per_server: 4\npreset: a100\n")
    cluster = Cluster.parse(str(path))
    assert (cluster.name, cluster.kind, cluster.servers, len(cluster.devices)) == ("lab", "a100", 2, 8)
    assert Cluster.parse(str(cluster)) == cluster


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
        ("{preset: v100, servers: 2, devices_per_server: 1}", "the key 'name' is missing; add name: VALUE"),
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


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(InputError, match=r"list\.yml must be a mapping with the keys name, preset, servers"):
        Cluster.parse(str(path))


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match="unknown preset 'h20'; did you mean 'h200'"):
        Cluster.preset("h20", 1, 1)


@pytest.mark.parametrize("count", ["2", 2.5, None])
def test_a_number_of_devices_is_whole(count: object) -> None:
    with pytest.raises(InputError, match="both must be whole numbers"):
        Cluster.local(count)  # type: ignore[arg-type]
