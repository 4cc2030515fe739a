// Decides which pickles may be passed to Python's own unpickler, which is fast but trusts its input. These are pickles
// like those of checkpoint metadata, which consist only of objects with fields, dicts, lists, tuples, text, bytes and
// numbers. This code walks through the opcodes of the pickle and creates no objects. It does not check the names of
// classes and functions in the pickle: the code that unpickles decides which of them it resolves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorferry {

// Return the end of such a pickle, which begins at the start of `data`. Return 0 if the pickle has other opcodes, is
// damaged, or would take time or memory out of proportion to its length. A pickle is accepted only if:
//  - every length lies within the data, and memo entries are numbered consecutively;
//  - items are set only in dicts and in results of calls, and appended only to lists;
//  - the state of an object is a dict with string keys only, or a tuple, but not of two values: with such a tuple BUILD
//    sets attributes by setattr(), even on classes and functions of the process;
//  - tuples used as keys have few values, counting nested ones: Python hashes them again at every use, and recursively
//    without a limit of depth.
size_t screened_pickle_end(std::span<const uint8_t> data);

}  // namespace tensorferry
