"""Tenants: whose entries of the n-gram cache a request may use.

A request names its tenant. Its entries of the cache have an owner, a number of 64 bits
that is a keyed hash of the name, and rows with another owner cannot find them. The key
is drawn when the server starts, so that nobody can choose a name with the owner of
another tenant. Requests without a tenant have the owner 0.

A tenant that is deleted has another owner from then on. Its entries remain in the cache
until others overwrite them, but no row has their owner any more.
"""

import hashlib
import secrets
from typing import NamedTuple


class Tenant(NamedTuple):
  """Whose request it is."""

  name: str = ""  # as the request says; "" for none
  owner: int = 0  # see `engine.requests.Request.owner`
  # How often the tenant had been deleted before the request arrived.
  generation: int = 0


class Tenants:
  """The tenants of a running server. Methods may be called from any thread."""

  def __init__(self, share_cache: bool):
    """Draws the key; with `share_cache`, all tenants have the owner 0."""
    self._shares_cache, self._key = share_cache, secrets.token_bytes(32)
    self._generations: dict[str, int] = {}  # of tenants that were deleted

  def of(self, name: str) -> Tenant:
    """Returns the tenant of a name."""
    generation = self._generations.get(name, 0)
    if not name or self._shares_cache:
      return Tenant(name, 0, generation)
    text = f"{generation} {name}".encode()
    hashed = hashlib.blake2b(text, key=self._key, digest_size=8)
    return Tenant(name, int.from_bytes(hashed.digest(), "big"), generation)

  def forget(self, name: str) -> Tenant:
    """Gives a tenant another owner from now on, and returns the present one."""
    former = self.of(name)
    self._generations[name] = former.generation + 1
    return former

  def is_forgotten(self, tenant: Tenant) -> bool:
    """Whether the tenant has been deleted since its request arrived."""
    return tenant.generation != self._generations.get(tenant.name, 0)
