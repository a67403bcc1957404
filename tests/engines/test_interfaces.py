"""Which interface reaches the other machines, asked on this one."""

import pytest

from lagom_overlap.engines.interfaces import interface_to_bind, interfaces, is_loopback, route_to


class Noticeboard:
    """A store in which another machine has already said where it sees ours."""

    def __init__(self, seen_at: str) -> None:
        self.seen_at = seen_at
        self.said: list[str] = []

    def get(self, key: str) -> bytes:
        return self.seen_at.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.said.append(desired)
        return desired.encode()


def test_the_loopback_interface_has_its_address() -> None:
    assert ("lo", "127.0.0.1") in list(interfaces())


def test_the_way_to_this_machine_is_a_loopback_one() -> None:
    own, other = route_to("127.0.0.1")
    assert (own, other) == ("127.0.0.1", "127.0.0.1")
    assert is_loopback(own)
    assert is_loopback("127.0.1.1")
    assert not is_loopback("fe80::1%eth0")


def test_a_name_without_an_address_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"'no such host\.invalid' does not resolve"):
        route_to("no such host.invalid")


def test_the_machine_of_the_store_binds_what_others_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own way to itself is a loopback one; here the others see it at the only address that every machine has."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_to_bind(Noticeboard("127.0.0.1")) == "lo"
    assert interface_to_bind(Noticeboard("203.0.113.9")) == ""


def test_an_interface_that_the_user_names_is_his(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_to_bind(Noticeboard("")) == ""
