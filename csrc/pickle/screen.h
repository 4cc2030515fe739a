// Which pickles may be given to Python's own unpickler, which is fast and believes all that it reads: those made of
// records, dicts, lists, tuples, text and numbers only, as metadata of checkpoints are. Nothing is made here, only
// the opcodes are walked through. What a name in the pickle stands for is for whoever unpickles it to say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tensorferry {

// Where such a pickle ends; 0 if it is another, damaged, or takes time or memory beyond what its length says:
//  - every length lies in the data, and memo entries are numbered one after the other;
//  - dicts, and what is called, are used as dicts; lists as lists; dicts of names, and tuples of all but two, as
//  states.
//    A tuple of two would set attributes by setattr(), also those of classes and functions of the process;
//  - tuples that are keys have few values, also nested: Python hashes these again and again, without a limit of depth.
size_t screened_pickle_end(std::span<const uint8_t> data);

}  // namespace tensorferry
