// The stand-in driver's state, and the functions with which tests control it.
#include "state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "standin.h"

namespace standin {

namespace {

constexpr std::size_t kPage = 4096;
// Allocations are aligned as a caching allocator's are: code must not rely on more alignment than CUDA promises.
constexpr std::size_t kAlignment = 512;

// Runs the operations queued on one stream, in order, until the stream is closed and empty.
void work(std::shared_ptr<Stream> stream) {
  State& all = state();
  std::unique_lock lock(all.mutex);
  while (true) {
    all.changed.wait(lock, [&] { return stream->closed || !stream->queue.empty(); });
    if (stream->queue.empty()) break;
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    const int code = operation();
    operation = nullptr;  // gives back the memory it holds
    lock.lock();
    if (code) {
      stream->error = code;
      if (all.options["poisoning"]) all.options["poison"] = code;
    }
    ++stream->done;
    all.changed.notify_all();
  }
  all.closing.erase(stream);
}

// Waits for all operations that are queued now on the selected streams.
template <typename Wanted>
void drain(std::unique_lock<std::mutex>& lock, Wanted wanted) {
  State& all = state();
  std::vector<std::pair<std::shared_ptr<Stream>, std::uint64_t>> ends;
  const auto look = [&](const std::shared_ptr<Stream>& stream) {
    if (wanted(*stream)) ends.emplace_back(stream, stream->queued);
  };
  for (const auto& [handle, stream] : all.streams) look(stream);
  for (const auto& [key, stream] : all.default_streams) look(stream);
  for (const auto& stream : all.closing) look(stream);
  all.changed.wait(lock,
                   [&] { return std::ranges::all_of(ends, [](auto& end) { return end.first->done >= end.second; }); });
}

int fill(const Range& range, std::size_t nbytes, int value) {
  const std::lock_guard lock(range.allocation->mutex);
  // A test may drop an array that its own kernel fills later.
  if (!range.allocation->freed) {
    std::memset(range.allocation->bytes + range.offset, value, nbytes);
  }
  return kSuccess;
}

int copy(const Range& destination, const Range& source, std::size_t nbytes) {
  std::unique_lock first(destination.allocation->mutex, std::defer_lock);
  std::unique_lock second(source.allocation->mutex, std::defer_lock);
  if (destination.allocation == source.allocation) {
    first.lock();
  } else {
    std::lock(first, second);
  }
  if (!destination.allocation->freed && !source.allocation->freed) {
    std::memmove(destination.allocation->bytes + destination.offset, source.allocation->bytes + source.offset, nbytes);
  }
  return kSuccess;
}

}  // namespace

Allocation::Allocation(int device, std::size_t nbytes) : device(device), nbytes(nbytes) {
  const std::size_t mapped = nbytes + kPage;
  void* seen = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* real = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (seen != MAP_FAILED) address = reinterpret_cast<std::uint64_t>(seen) + kAlignment;
  if (real != MAP_FAILED) bytes = static_cast<char*>(real) + kAlignment;
}

Allocation::~Allocation() {
  const std::size_t mapped = nbytes + kPage;
  if (address) munmap(reinterpret_cast<void*>(address - kAlignment), mapped);
  if (bytes) munmap(bytes - kAlignment, mapped);
}

void State::add(const std::string& counter, std::int64_t change) {
  Counter& found = counters[counter];
  found.now += change;
  found.peak = std::max(found.peak, found.now);
}

int State::ordered_failure(const char* function, bool later) {
  int code = kSuccess;
  for (Failure& failure : failures) {
    if (failure.function != function || failure.later != later || failure.times == 0) continue;
    if (failure.after > 0) {
      --failure.after;
    } else if (!code) {
      if (failure.times > 0) --failure.times;
      code = failure.code;
    }
  }
  return code;
}

Range State::find(std::uint64_t address, std::size_t nbytes) {
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return {};
  const auto& [begin, allocation] = *std::prev(next);
  const std::size_t offset = address - begin;
  if (offset >= allocation->nbytes || nbytes > allocation->nbytes - offset) return {};
  return {allocation, offset};
}

bool State::is_registered(const void* host, std::size_t nbytes, int device) const {
  const auto address = reinterpret_cast<std::uintptr_t>(host);
  auto next = registered.upper_bound(address);
  if (next == registered.begin()) return false;
  const auto& [begin, range] = *std::prev(next);
  const std::size_t offset = address - begin;
  return offset <= range.nbytes && nbytes <= range.nbytes - offset && (range.device < 0 || range.device == device);
}

std::shared_ptr<Stream> State::stream(int device, void* handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number > 2) {
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second;
  }
  const bool per_thread = number == 2;
  const auto thread = per_thread ? std::this_thread::get_id() : std::thread::id();
  auto& found = default_streams[{device, per_thread ? 2 : 1, thread}];
  if (!found) {
    found = std::make_shared<Stream>();
    found->device = device;
  }
  return found;
}

void State::queue(const std::shared_ptr<Stream>& stream, Operation operation) {
  stream->queue.push_back(std::move(operation));
  ++stream->queued;
  if (!std::exchange(stream->started, true)) std::thread(work, stream).detach();
  changed.notify_all();
}

// As in CUDA, a destroyed stream first finishes its queued operations.
void State::close(const std::shared_ptr<Stream>& stream) {
  stream->closed = true;
  if (stream->started) closing.insert(stream);
  streams.erase(stream.get());
  changed.notify_all();
}

State& state() {
  static State* const instance = new State;
  return *instance;
}

std::vector<Device*>& contexts() {
  thread_local std::vector<Device*> stack;
  return stack;
}

bool forked() {
  const pid_t process = state().initialized_in;
  return process != 0 && process != getpid();
}

}  // namespace standin

using namespace standin;

void standin_reset() {
  State& all = state();
  std::unique_lock lock(all.mutex);
  all.options = default_options();
  all.failures.clear();
  ++all.resets;  // releases every latch
  all.changed.notify_all();
  drain(lock, [](const Stream&) { return true; });
  all.released.clear();
  for (auto& [handle, stream] : all.streams) stream->error = 0;
  for (auto& [key, stream] : all.default_streams) {
    stream->error = 0;
    stream->capture_status = 0;
  }
  for (auto& [name, counter] : all.counters) {
    if (!kGauges.contains(name)) counter.now = 0;
    counter.peak = counter.now;
  }
}

int standin_set(const char* option, std::int64_t value) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.options.find(option);
  if (found == all.options.end()) return -1;
  found->second = value;
  return 0;
}

namespace {

std::int64_t counted(const std::string& name, std::int64_t Counter::* what) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (!kGauges.contains(name) && !kTallies.contains(name) && !name.starts_with("cu")) return -1;
  const auto found = all.counters.find(name);
  return found == all.counters.end() ? 0 : found->second.*what;
}

}  // namespace

std::int64_t standin_count(const char* counter) { return counted(counter, &Counter::now); }

std::int64_t standin_peak(const char* counter) { return counted(counter, &Counter::peak); }

void standin_fail(const char* function, std::int64_t after, std::int64_t times, int code, int later) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.failures.push_back({function, after, times, code, later != 0});
}

std::uint64_t standin_allocate(int device, std::size_t nbytes) {
  if (device < 0 || device >= kDevicesMax) return 0;
  auto allocation = std::make_shared<Allocation>(device, nbytes);
  if (!allocation->usable()) return 0;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.add("allocations", 1);
  all.add("allocated_nbytes", static_cast<std::int64_t>(nbytes));
  const std::uint64_t address = allocation->address;
  all.allocations[address] = std::move(allocation);
  return address;
}

int standin_free(std::uint64_t address) {
  if (forked()) return kNotInitialized;
  State& all = state();
  std::shared_ptr<Allocation> allocation;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.allocations.find(address);
    if (found == all.allocations.end()) return kInvalidValue;
    allocation = std::move(found->second);
    all.allocations.erase(found);
    all.add("allocations", -1);
    all.add("allocated_nbytes", -static_cast<std::int64_t>(allocation->nbytes));
  }
  const std::lock_guard lock(allocation->mutex);
  allocation->freed = true;
  return kSuccess;
}

namespace {

template <typename Access>
int access(std::uint64_t address, std::size_t nbytes, Access with) {
  State& all = state();
  Range range;
  {
    const std::lock_guard lock(all.mutex);
    range = all.find(address, nbytes);
  }
  if (!range) return kInvalidValue;
  const std::lock_guard lock(range.allocation->mutex);
  if (range.allocation->freed) return kIllegalAddress;
  with(range.allocation->bytes + range.offset);
  return kSuccess;
}

}  // namespace

int standin_peek(std::uint64_t address, void* host, std::size_t nbytes) {
  return access(address, nbytes, [=](char* bytes) { std::memcpy(host, bytes, nbytes); });
}

int standin_poke(std::uint64_t address, const void* host, std::size_t nbytes) {
  return access(address, nbytes, [=](char* bytes) { std::memcpy(bytes, host, nbytes); });
}

void* standin_stream_create(int device) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  void* handle = stream.get();
  all.streams[handle] = std::move(stream);
  return handle;
}

int standin_stream_destroy(void* handle) {
  if (forked()) return kNotInitialized;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.streams.find(handle);
  if (found == all.streams.end()) return kInvalidHandle;
  all.close(std::shared_ptr(found->second));
  return kSuccess;
}

int standin_set_capture(int device, void* handle, int status) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto stream = all.stream(device, handle);
  if (!stream) return kInvalidHandle;
  stream->capture_status = status;
  return kSuccess;
}

int standin_kernel(int device, void* handle, std::int64_t delay_us, const char* latch, std::uint64_t address,
                   std::size_t nbytes, int value) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto stream = all.stream(device, handle);
  if (!stream) return kInvalidHandle;
  Range range;
  if (nbytes && !(range = all.find(address, nbytes))) return kInvalidValue;
  std::string name = latch ? latch : "";
  all.queue(stream, [=, &all, resets = all.resets] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    if (!name.empty()) {
      std::unique_lock waiting(all.mutex);
      all.changed.wait(waiting, [&] { return all.resets != resets || all.released.contains(name); });
    }
    return nbytes ? fill(range, nbytes, value) : kSuccess;
  });
  return kSuccess;
}

void standin_release(const char* latch) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.released.insert(latch);
  all.changed.notify_all();
}

int standin_copy(int device, void* handle, std::uint64_t destination, std::uint64_t source, std::size_t nbytes) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto stream = all.stream(device, handle);
  if (!stream) return kInvalidHandle;
  const Range to = all.find(destination, nbytes);
  const Range from = all.find(source, nbytes);
  if (!to || !from) return kInvalidValue;
  all.queue(stream, [=] { return copy(to, from, nbytes); });
  return kSuccess;
}

int standin_synchronize(int device) {
  State& all = state();
  std::unique_lock lock(all.mutex);
  drain(lock, [=](const Stream& stream) { return stream.device == device; });
  return kSuccess;
}

int standin_enter(const char* function) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.add(function, 1);
  return all.ordered_failure(function, false);
}

void standin_add(const char* counter, std::int64_t change) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.add(counter, change);
}

std::int64_t standin_option(const char* option) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  return all.options.at(option);
}

int standin_device_of(std::uint64_t address, std::size_t nbytes) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const Range range = all.find(address, nbytes);
  return range ? range.allocation->device : -1;
}

int standin_current_device() { return contexts().empty() ? -1 : contexts().back()->ordinal; }
