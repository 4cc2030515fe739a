// Allocations and the bounce pool.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
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

TEST_CASE("an allocation may end on another thread while it is looked up") {
  std::atomic<uintptr_t> last{0};
  std::atomic<bool> over{false};
  std::thread maker([&] {
    for (int round = 0; round < 20'000; ++round) {
      const auto allocation = Allocation::create(4096, Locking::none);
      last = reinterpret_cast<uintptr_t>(allocation->data());
    }
    over = true;
  });
  uint64_t found = 0;
  while (!over) found += Allocation::containing(reinterpret_cast<void*>(last.load() + 8192), 1) != nullptr;
  maker.join();
  CHECK(found == 0);
}

TEST_CASE("memory that no system has is refused, not promised") {
  CHECK_FALSE(Allocation::create(SIZE_MAX / 4, Locking::none));
  CHECK_FALSE(Allocation::create(SIZE_MAX, Locking::none));
}

TEST_CASE("lent memory is returned once") {
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
  BounceTicket ticket;
  const auto waiter = std::make_shared<CountingWaiter>();
  while (true) {
    const size_t nbytes = (buffers.size() % 3 + 1) * BouncePool::unit_nbytes;
    auto buffer = pool->try_acquire(nbytes, waiter.get(), &ticket);
    if (!buffer) break;
    std::memset(buffer.data(), 1, nbytes);
    for (size_t unit = 0; unit < nbytes; unit += BouncePool::unit_nbytes)
      CHECK(units.insert(buffer.data() + unit).second);
    buffers.push_back(std::move(buffer));
  }
  CHECK(pool->nbytes_in_use() == units.size() * BouncePool::unit_nbytes);
  CHECK(pool->nbytes_in_use() > BouncePool::min_nbytes - 3 * BouncePool::unit_nbytes);
  CHECK(waiter->calls == 0);
  buffers.clear();
  CHECK(waiter->calls > 0);
  CHECK(pool->nbytes_in_use() == 0);
  ticket.reset();
  CHECK(pool->try_acquire(BouncePool::min_nbytes, nullptr));
}

TEST_CASE("a removed waiter is not called") {
  auto pool = std::make_shared<BouncePool>(BouncePool::min_nbytes);
  auto all = pool->try_acquire(BouncePool::min_nbytes, nullptr);
  auto waiter = std::make_shared<CountingWaiter>();
  BounceTicket ticket;
  CHECK_FALSE(pool->try_acquire(1, waiter.get(), &ticket));
  waiter.reset();
  all.reset();
  CHECK(pool->nbytes_in_use() == 0);
}

TEST_CASE("memory is given out in the order of the queue, and a waiter that leaves holds up no other") {
  auto pool = std::make_shared<BouncePool>(BouncePool::min_nbytes);
  constexpr size_t half = BouncePool::min_nbytes / 2;
  auto first = pool->try_acquire(half), second = pool->try_acquire(half);
  const auto large = std::make_shared<CountingWaiter>(), small = std::make_shared<CountingWaiter>();
  BounceTicket ticket_of_large, ticket_of_small;
  CHECK_FALSE(pool->try_acquire(2 * half, large.get(), &ticket_of_large));
  CHECK_FALSE(pool->try_acquire(1, small.get(), &ticket_of_small));
  first.reset();
  CHECK(large->calls == 0);  // there is no run for it
  CHECK_FALSE(pool->try_acquire(1));
  CHECK_FALSE(pool->try_acquire(1, small.get(), &ticket_of_small));
  second.reset();
  CHECK(large->calls == 1);
  CHECK(small->calls == 0);
  auto all = pool->try_acquire(2 * half, large.get(), &ticket_of_large);
  REQUIRE(all);
  BounceTicket another;
  CHECK_FALSE(pool->try_acquire(half, large.get(), &another));
  all.reset();
  CHECK(small->calls == 1);
  ticket_of_small = {};  // gives up without taking anything
  CHECK(large->calls == 2);
  CHECK(pool->try_acquire(half, large.get(), &another));
  CHECK(pool->try_acquire(1));
}

TEST_CASE("runs that come back in any order are one run again") {
  auto pool = std::make_shared<BouncePool>(BouncePool::min_nbytes);
  std::vector<BounceBuffer> buffers;
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    while (auto buffer = pool->try_acquire(BouncePool::unit_nbytes * (random() % 5 + 1), nullptr)) {
      buffers.push_back(std::move(buffer));
    }
    std::shuffle(buffers.begin(), buffers.end(), random);
    buffers.resize(round % 2 ? 0 : buffers.size() / 2);
    if (buffers.empty()) CHECK(pool->try_acquire(BouncePool::min_nbytes, nullptr));
  }
}

TEST_CASE("each device has a pool, made on demand and freed with its users; beyond a limit devices share pools") {
  std::vector<std::shared_ptr<BouncePool>> pools;
  for (uint64_t device = 100; device < 100 + BouncePool::max_pools; ++device) pools.push_back(BouncePool::of(device));
  CHECK(std::set(pools.begin(), pools.end()).size() == BouncePool::max_pools);
  CHECK(BouncePool::of(100) == pools[0]);
  const auto used = pools[0]->try_acquire(1, nullptr);
  const auto shared = BouncePool::of(1);
  CHECK(shared != pools[0]);  // that of which least is in use
  CHECK(std::count(pools.begin(), pools.end(), shared) == 1);
  const std::weak_ptr<BouncePool> gone = pools[5];
  pools.resize(2);
  CHECK(gone.expired());
  CHECK(BouncePool::of(1) != shared);
  BouncePool::set_process_pool_nbytes(2 * BouncePool::min_nbytes);
  CHECK(pools[0]->replaced());
  CHECK(BouncePool::of(100)->nbytes() == 2 * BouncePool::min_nbytes);
  BouncePool::set_process_pool_nbytes(BouncePool::default_nbytes);
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
