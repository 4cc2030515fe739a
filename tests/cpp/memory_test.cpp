// Allocations and the bounce pool.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "memory/allocation.h"
#include "memory/bounce_pool.h"

namespace tensorferry {
namespace {

TEST_CASE("an allocation is aligned, zeroed and known by its addresses") {
  for (size_t nbytes : {size_t{1}, size_t{4096}, size_t{5000}, size_t{3} << 20}) {
    auto allocation = Allocation::create(nbytes, Locking::none);
    REQUIRE(allocation);
    CHECK(reinterpret_cast<uintptr_t>(allocation->data()) % 4096 == 0);
    CHECK(allocation->data()[nbytes - 1] == 0);
    CHECK(Allocation::containing(allocation->data(), nbytes) == allocation);
    CHECK(Allocation::containing(allocation->data() + nbytes - 1, 1) == allocation);
    CHECK_FALSE(Allocation::containing(allocation->data(), nbytes + 1));
    CHECK_FALSE(Allocation::containing(allocation->data() - 1, 1));
    char* data = allocation->data();
    allocation.reset();
    CHECK_FALSE(Allocation::containing(data, 1));
  }
}

TEST_CASE("memory that no system has is refused, not promised") {
  CHECK_FALSE(Allocation::create(SIZE_MAX / 4, Locking::none));
  CHECK_FALSE(Allocation::create(SIZE_MAX, Locking::none));
}

TEST_CASE("lent memory is given back once") {
  auto allocation = Allocation::create(4096, Locking::wanted);
  REQUIRE(allocation);
  CHECK(allocation->lent());
  CHECK(allocation->give_back());
  CHECK_FALSE(allocation->lent());
  CHECK_FALSE(allocation->give_back());
  CHECK_FALSE(allocation->locked());
  CHECK_FALSE(Allocation::create(4096, Locking::none)->give_back());
}

struct CountingWaiter final : BounceWaiter {
  std::atomic<int> calls{0};
  void bounce_memory_released() override { ++calls; }
};

TEST_CASE("buffers never overlap, run out, and come back") {
  auto pool = std::make_shared<BouncePool>(BouncePool::min_nbytes);
  std::vector<BounceBuffer> buffers;
  std::set<char*> units;
  CountingWaiter waiter;
  while (true) {
    const size_t nbytes = (buffers.size() % 3 + 1) * BouncePool::unit_nbytes;
    auto buffer = pool->try_acquire(nbytes, &waiter);
    if (!buffer) break;
    std::memset(buffer.data(), 1, nbytes);
    for (size_t unit = 0; unit < nbytes; unit += BouncePool::unit_nbytes)
      CHECK(units.insert(buffer.data() + unit).second);
    buffers.push_back(std::move(buffer));
  }
  CHECK(pool->nbytes_in_use() == units.size() * BouncePool::unit_nbytes);
  CHECK(pool->nbytes_in_use() > BouncePool::min_nbytes - 3 * BouncePool::unit_nbytes);
  CHECK(waiter.calls == 0);
  buffers.pop_back();
  CHECK(waiter.calls == 1);  // once for each failed attempt
  buffers.clear();
  CHECK(waiter.calls == 1);
  CHECK(pool->nbytes_in_use() == 0);
  CHECK(pool->try_acquire(BouncePool::min_nbytes, nullptr));
}

TEST_CASE("a waiter that forgot is not called") {
  auto pool = std::make_shared<BouncePool>(BouncePool::min_nbytes);
  auto all = pool->try_acquire(BouncePool::min_nbytes, nullptr);
  CountingWaiter waiter;
  CHECK_FALSE(pool->try_acquire(1, &waiter));
  BouncePool::forget(&waiter);
  all.reset();
  CHECK(waiter.calls == 0);
}

TEST_CASE("many threads share a pool") {
  auto pool = std::make_shared<BouncePool>(BouncePool::min_nbytes);
  std::vector<std::thread> threads;
  std::atomic<int> torn{0};
  for (int id = 1; id <= 4; ++id)
    threads.emplace_back([&, id] {
      for (int round = 0; round < 300; ++round) {
        auto buffer = pool->try_acquire(static_cast<size_t>(id) * 40'000, nullptr);
        if (!buffer) continue;
        std::memset(buffer.data(), id, 40'000);
        for (size_t i = 0; i < 40'000; i += 997) torn += buffer.data()[i] != id;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(torn == 0);
  CHECK(pool->nbytes_in_use() == 0);
}

}  // namespace
}  // namespace tensorferry
