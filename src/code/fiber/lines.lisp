;;;; objects that share no cache line with others, and stores that leave the card table alone

;;;; This software is part of the SBCL system. See the README file for
;;;; more information.
;;;;
;;;; This software is derived from the CMU CL system, which was
;;;; written at Carnegie Mellon University and released into the
;;;; public domain. The software is in the public domain and is
;;;; provided with absolutely no warranty. See the COPYING and CREDITS
;;;; files for more information.

(in-package "SB-FIBER")

;;; A line that two carriers write goes to and fro between their processors, at a cost of a whole
;;; switch each time. Two things make lines shared by what has nothing in common:
;;;  - the collector puts structures of the same kind side by side, as it does with what the
;;;    carriers of a group were made of;
;;;  - a pointer that is stored marks its card, a byte, and a line of the card table covers the
;;;    objects of 32 KiB: fibers which were made together, run by several carriers.
;;; Hence structures that keep their distance from other objects, for what a carrier writes in each
;;; switch, and stores that do not write a mark that is there already, as it is in all switches but
;;; the first after a collection. (Of such a structure others write some slots, too: thieves the
;;; head of a run queue, and the monitor what it has seen.)

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun padding-slots (prefix)
    (loop for i from 1 to 7
          collect `(,(symbolicate prefix (princ-to-string i)) 0 :type fixnum :read-only t))))

(defmacro defstruct-apart (name-and-options &rest slots)
  "As DEFSTRUCT, for a structure none of whose SLOTS shares a line with another object."
  `(defstruct ,name-and-options
     ,@(padding-slots "BEFORE-")
     ,@slots
     ,@(padding-slots "AFTER-")))

(defmacro store-slot ((type slot) instance value)
  "Set SLOT of INSTANCE, a structure of TYPE, to VALUE, and return no value."
  `(%store-slot (the ,type ,instance) (get-dsd-index ,type ,slot) ,value))

(defmacro store-place (vector index value)
  "Set the element of VECTOR, a simple vector, at INDEX, which it has, to VALUE, and return no
value."
  `(%store-place ,vector ,index ,value))
