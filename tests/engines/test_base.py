"""Sessions that change one thing about another session."""

from bflcore.engines.base import Session, Wrapped


class Recording(Session):
    def __init__(self):
        self.calls = []

    @property
    def memories(self):
        return {1: {}}

    def restore(self, memories):
        self.calls.append(("restore", memories))

    def survey(self, known, clients):
        yield ("survey", known, clients)

    def fit(self, broadcast, clients):
        yield ("fit", broadcast, clients)

    def store(self, result):
        self.calls.append(("store", result))

    def evaluate(self, broadcast, clients):
        yield ("evaluate", broadcast, clients)

    def calibrate(self, broadcast, clients):
        yield ("calibrate", broadcast, clients)

    def personalise(self, broadcast, clients):
        yield ("personalise", broadcast, clients)


def test_a_wrapped_session_forwards_everything():
    inner = Recording()
    outer = Wrapped(inner)
    assert list(outer.survey({}, [3])) == [("survey", {}, [3])]
    assert list(outer.fit("b", [1])) == [("fit", "b", [1])]
    assert list(outer.evaluate("b", [2])) == [("evaluate", "b", [2])]
    assert list(outer.calibrate("b", [3])) == [("calibrate", "b", [3])]
    assert list(outer.personalise("b", [4])) == [("personalise", "b", [4])]
    assert outer.memories == {1: {}}
    outer.restore({2: {}})
    outer.store("result")
    assert inner.calls == [("restore", {2: {}}), ("store", "result")]


def test_a_session_keeps_no_memories_unless_it_says_so():
    class Forgetful(Recording):
        memories = Session.memories

    assert Forgetful().memories == {}


def test_models_stay_with_the_clients_unless_a_session_gives_them():
    class Distant(Recording):
        personalise = Session.personalise

    assert list(Distant().personalise("b", [1, 2])) == []


def test_a_session_that_does_not_calibrate_says_so():
    class Old(Recording):
        calibrate = Session.calibrate

    found = [str(error) for error in Old().calibrate("b", [1, 2])]
    assert found[1] == "client 2 failed in calibrate: its engine does not calibrate"
    assert len(found) == 2
