// How tests control the stand-in driver, and how its cuFile reaches its memory. Everything is C, so
// that Python needs ctypes only and C++ tests may link against the library that the core opens as
// well. Options, counters and failures are named by strings; state.h defines the names.
#pragma once

#include <cstddef>
#include <cstdint>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

// Clears options, failures and counts, releases latches, and waits for all queued operations. Allocations,
// registrations and created objects stay.
STANDIN_API void standin_reset();

// Returns 0, or -1 for an unknown option.
STANDIN_API int standin_set(const char* option, std::int64_t value);

// Returns the current value of a gauge, or the count of a tally since the last reset; -1: no such counter.
// Every exported function has a counter of its name.
STANDIN_API std::int64_t standin_count(const char* counter);
STANDIN_API std::int64_t standin_peak(const char* counter);

// After `after` calls, `times` calls of the function (-1: all) give `code`. Later: the call succeeds,
// but the operation that it queued fails when the stream runs it (only copies queue operations).
STANDIN_API void standin_fail(const char* function, std::int64_t after, std::int64_t times, int code, int later);

// Device memory, zeroed; 0 on failure. Peek and poke are synchronous, and ask no stream.
STANDIN_API std::uint64_t standin_allocate(int device, std::size_t nbytes);
STANDIN_API int standin_free(std::uint64_t address);
STANDIN_API int standin_peek(std::uint64_t address, void* host, std::size_t nbytes);
STANDIN_API int standin_poke(std::uint64_t address, const void* host, std::size_t nbytes);

// Streams of users: handles 0, 1 and 2 are the device's default streams, as in CUDA.
STANDIN_API void* standin_stream_create(int device);
STANDIN_API int standin_stream_destroy(void* stream);
STANDIN_API int standin_set_capture(int device, void* stream, int status);

// Queues a kernel: it sleeps, waits for the latch (unless null) to be released, then fills memory.
STANDIN_API int standin_kernel(int device, void* stream, std::int64_t delay_us, const char* latch,
                               std::uint64_t address, std::size_t nbytes, int value);
STANDIN_API void standin_release(const char* latch);
STANDIN_API int standin_copy(int device, void* stream, std::uint64_t destination, std::uint64_t source,
                             std::size_t nbytes);
STANDIN_API int standin_synchronize(int device);

// For the stand-in cuFile: count a call and return the error ordered for it; change a counter;
// read an option; return the device of an address and the current device, or -1.
STANDIN_API int standin_enter(const char* function);
STANDIN_API void standin_add(const char* counter, std::int64_t change);
STANDIN_API std::int64_t standin_option(const char* option);
STANDIN_API int standin_device_of(std::uint64_t address, std::size_t nbytes);
STANDIN_API int standin_current_device();
