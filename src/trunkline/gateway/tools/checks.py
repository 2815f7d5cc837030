"""Whether constraints can be compiled, remembering those that cannot: finding out why takes long."""

from collections import OrderedDict
from hashlib import blake2b
from threading import Lock

from trunkline.gateway.executor import Executor
from trunkline.wire.turns import Constraint, ConstraintError

KEPT = 256


class Checks:
    """Asks an executor, which itself keeps what it compiled. Thread-safe."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()

    def problem(self, constraint: Constraint) -> str | None:
        """Why `constraint` cannot be used; None if it can."""
        key = blake2b(constraint.grammar.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            known = self._reasons.get(key)
        if known is not None:
            return known
        try:
            self._executor.check_constraint(constraint)
        except ConstraintError as error:
            with self._lock:
                self._reasons[key] = str(error)
                while len(self._reasons) > KEPT:
                    self._reasons.popitem(last=False)
            return str(error)
        return None
