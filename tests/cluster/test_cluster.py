"""Clusters: what is built, how text reads and prints, and what bad text is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler.cluster import LOCAL, PRESETS, Cluster, Device
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
